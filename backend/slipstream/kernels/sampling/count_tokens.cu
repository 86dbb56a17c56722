// Counts of tokens from whole histories: one CTA a sequence.
#include "runtime/common.cuh"

constexpr int THREADS = 1024;
constexpr u32 MAX_COUNT = 0x7fff, IN_PROMPT = 0x8000;

// Add to a count, or tell that the prompt has the token.
DEVICE void add(u16* state, u32 count, bool is_prompt) {
  u16 before = *state, seen;
  do {
    seen = before;
    const u32 sum = min((seen & MAX_COUNT) + count, MAX_COUNT);
    const u16 after = u16(is_prompt ? seen | IN_PROMPT : (seen & IN_PROMPT) | sum);
    if (after == seen) return;
    before = atomicCAS(state, seen, after);
  } while (before != seen);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    count_tokens(u16* counts, i64 num_tokens, const int* tokens, const int* slots, const int* starts,
                 const int* num_prompts) {
  wait_for_previous();
  start_next();
  u16* states = counts + slots[blockIdx.x] * num_tokens;
  const int start = starts[blockIdx.x], length = starts[blockIdx.x + 1] - start;
  const int num_prompt = num_prompts[blockIdx.x];
  if (num_tokens % 8 == 0) {
    for (i64 id = 8 * threadIdx.x; id < num_tokens; id += 8 * THREADS) store(states + id, Pack<u16, 8>{});
  } else {
    for (i64 id = threadIdx.x; id < num_tokens; id += THREADS) states[id] = 0;
  }
  __syncthreads();
  for (int first = 0; first < length; first += THREADS) {
    const int i = first + threadIdx.x;
    const bool is_prompt = i < num_prompt;
    const int token = i < length ? tokens[start + i] : -1;
    // A warp adds each token once, so that a sequence that repeats itself does not queue for one address.
    const u32 same = __match_any_sync(ALL_LANES, token * 2 + is_prompt);
    if (token >= 0 && __ffs(same) - 1 == threadIdx.x % 32) add(states + token, __popc(same), is_prompt);
  }
}
