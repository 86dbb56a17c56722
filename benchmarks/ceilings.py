"""What this GPU reaches at best: reading memory, multiplying large matrices."""

import time
from typing import Any

import torch

READ_BYTES = 8 << 30
_READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_range(
    const uint4* __restrict__ data, long long num_vectors, unsigned* never)
{
    // A contiguous range for each CTA, eight loads in flight for each thread.
    const uint4* range = data + blockIdx.x * num_vectors;
    unsigned mixed = 0;
    for (long long i = threadIdx.x; i + 7 * 512 < num_vectors; i += 8 * 512) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(range + i + j * 512);
#pragma unroll
        for (int j = 0; j < 8; ++j) mixed ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (mixed == 0x9e3779b9u) *never = mixed;  // keeps the loads
}
"""


def read_bandwidth() -> float:
    """Bytes a second of a kernel that reads 8 GiB once and writes nothing; the best of a few."""
    import cupy

    data = torch.randint(0, 1 << 30, (READ_BYTES // 8,), device="cuda")
    never = torch.empty(1, dtype=torch.int32, device="cuda")
    kernel = cupy.RawModule(code=_READ).get_function("read_range")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    best = 0.0
    for ctas_per_sm in (1, 2, 4):
        grid = ctas_per_sm * num_sms
        a_cta = READ_BYTES // 16 // grid // 4096 * 4096  # whole turns of its loop
        for _ in range(4):
            start, end = (cupy.cuda.Event() for _ in range(2))
            start.record()
            kernel((grid,), (512,), (data.data_ptr(), a_cta, never.data_ptr()))
            end.record()
            end.synchronize()
            seconds = cupy.cuda.get_elapsed_time(start, end) * 1e-3
            best = max(best, a_cta * 16 * grid / seconds)
    return best


def matrix_rate() -> float:
    """bf16 operations a second of torch's product of square matrices, sustained."""
    seconds, size = 0.5, 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(20):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize()
        count += 20
    return count * 2 * size**3 / (time.perf_counter() - begin)


def measure() -> dict[str, Any]:
    """Both, as the results keep them."""
    torch.cuda.init()
    rates = {
        "read_tb_s": round(read_bandwidth() / 1e12, 3),
        "bf16_tflop_s": round(matrix_rate() / 1e12, 1),
    }
    torch.cuda.empty_cache()
    return rates


if __name__ == "__main__":
    print(measure())
