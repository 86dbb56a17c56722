#include "pool.h"

#include <immintrin.h>
#include <pthread.h>

#include <algorithm>
#include <thread>

namespace slipstream {
namespace {

constexpr int SPINS = 2000;  // some 20 microseconds: the gap between two loops of a step
constexpr uint32_t OPEN = 1u << 31, JOINED = 1u << 16;  // of `state`; its low half: who is at work

struct Pool {
    std::atomic<uint32_t> loop{0};   // grows by one a loop: what idle threads wait for
    std::atomic<uint32_t> state{0};  // whether the loop takes helpers, how many came, how many work
    std::atomic<int64_t> next{0};
    int64_t count = 0, grain = 1;
    Body body = nullptr;
    void *context = nullptr;
    uint32_t helpers = 0;  // that the loop takes
    int started = 0;

    void work(int thread) {
        for (;;) {
            const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
            if (first >= count) return;
            body(context, first, std::min(count, first + grain), thread);
        }
    }

    // Helps with the loop, unless it has ended or has helpers enough. Nobody waits for a thread
    // that has not joined: on a busy machine it may not run for milliseconds.
    void help() {
        uint32_t now = state.load(std::memory_order_acquire);
        for (;;) {
            const uint32_t joined = (now & ~OPEN) / JOINED;
            if (!(now & OPEN) || joined >= helpers) return;
            if (state.compare_exchange_weak(now, now + JOINED + 1, std::memory_order_acq_rel)) {
                work(static_cast<int>(joined) + 1);
                state.fetch_sub(1, std::memory_order_release);
                return;
            }
        }
    }

    void serve(uint32_t seen) {
        for (;;) {
            uint32_t now = loop.load(std::memory_order_acquire);
            for (int i = 0; now == seen && i < SPINS; ++i) {
                _mm_pause();
                now = loop.load(std::memory_order_acquire);
            }
            if (now == seen) {
                loop.wait(seen, std::memory_order_acquire);
                continue;
            }
            seen = now;
            help();
        }
    }

    void start(int wanted) {
        for (; started < wanted; ++started)
            std::thread([this, seen = loop.load()] { serve(seen); }).detach();
    }
};

Pool *pool = new Pool;  // never destroyed: its threads may outlive static objects

void forget_after_fork() { pool = new Pool; }  // a child has none of the threads

struct AtFork {
    AtFork() { pthread_atfork(nullptr, nullptr, forget_after_fork); }
} at_fork;

}  // namespace

void run_parts(int threads, int64_t count, int64_t grain, Body body, void *context) {
    if (count <= 0) return;
    grain = std::max<int64_t>(1, grain);
    const int64_t parts = (count + grain - 1) / grain;
    const int64_t most = std::min<int64_t>(std::min(threads, MAX_THREADS), parts);
    if (most <= 1) {
        for (int64_t first = 0; first < count; first += grain)
            body(context, first, std::min(count, first + grain), 0);
        return;
    }
    Pool &p = *pool;
    p.start(static_cast<int>(most) - 1);
    p.count = count, p.grain = grain, p.body = body, p.context = context;
    p.helpers = static_cast<uint32_t>(most) - 1;
    p.next.store(0, std::memory_order_relaxed);
    p.state.store(OPEN, std::memory_order_release);
    p.loop.fetch_add(1, std::memory_order_release);
    p.loop.notify_all();
    p.work(0);
    p.state.fetch_and(~OPEN, std::memory_order_acq_rel);
    while (p.state.load(std::memory_order_acquire) & 0xffff) _mm_pause();
}

}  // namespace slipstream
