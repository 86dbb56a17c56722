// A pool of threads that share out the parts of one loop at a time.
#pragma once

#include <atomic>
#include <cstdint>

namespace slipstream {

// Calls `run(context, first, end, thread)` for parts of `grain` of 0 .. count - 1, by up to
// `threads` threads, the caller among them, and returns when all are done. Which thread gets a part
// depends on who is free: results must not depend on it.
using Body = void (*)(void *context, int64_t first, int64_t end, int thread);
void run_parts(int threads, int64_t count, int64_t grain, Body body, void *context);

template <class Function>
void parallel(int threads, int64_t count, int64_t grain, const Function &function) {
    auto call = [](void *context, int64_t first, int64_t end, int thread) {
        (*static_cast<const Function *>(context))(first, end, thread);
    };
    run_parts(threads, count, grain, call, const_cast<Function *>(&function));
}

constexpr int MAX_THREADS = 256;

}  // namespace slipstream
