// Page-locked host memory to the device, read by the multiprocessors.
#include "runtime/common.cuh"

using Vector = Pack<u32, 4>;

// Any grid; with a thread for each vector all of them cross the bus at once.
extern "C" __global__ void __launch_bounds__(256) upload(Vector* destination, const Vector* source, i64 size) {
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += i64(gridDim.x) * blockDim.x)
    destination[i] = source[i];
}
