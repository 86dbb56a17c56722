// The plan of decode attention, made once a step: which tiles every worker (a warp of the grid) attends to.
//
// A tile is TILE tokens of one (sequence, head); a head stands for the query heads that share a kv head, or for some
// of them where they are many. Tiles lie in the order sequence, head, token: each CTA gets a run of them, each
// worker a run of its CTA's. With a window, tiles in front of it are left out, but for those of sinks; the others keep
// their numbers. So it is with what is attended to together with other sequences (prefixes.cuh).
// -D TILE, WINDOWED (1: the newest token sees the last tokens alone), SINKS (1: and the first ones), SHARES (1: there
// may be what sequences share)
#pragma once
#include "runtime/common.cuh"
#include "attention/prefixes.cuh"

#ifndef SHARES
#define SHARES 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
static_assert(WINDOWED || !SINKS, "without a window there is nothing between sinks and others");

// What the newest token of a sequence sees: the last `size` tokens if WINDOWED, with the first `sinks` if SINKS.
struct Window {
  int size;
  int sinks;

  // The first of the last tokens.
  DEVICE int first_seen(int length) const { return WINDOWED ? max(0, length - size) : 0; }
  DEVICE int sink_tiles() const { return SINKS ? (sinks + TILE - 1) / TILE : 0; }
  // Tiles that are left out: those behind the sinks' in front of the last tokens'.
  DEVICE int num_left_out(int length) const { return max(0, first_seen(length) / TILE - sink_tiles()); }
  // The number of the tile that is number `index` among those that are not left out.
  DEVICE int tile(int index, int length) const {
    return index < sink_tiles() ? index : index + num_left_out(length);
  }
};

#if SHARES
static_assert(!WINDOWED, "a window hides what sequences share");
struct alignas(16) Sequence {
  int row;  // of the batch
  int length;
  RowPrefix prefix;
};
DEVICE int first_tile(const Sequence& sequence, const Window&) { return sequence.prefix.first_tile; }
#else
struct alignas(8) Sequence {
  int row;  // of the batch
  int length;
};
DEVICE int first_tile(const Sequence& sequence, const Window& window) { return window.tile(0, sequence.length); }
#endif

// The first tile of a worker, and what it must know to go on from there.
struct alignas(16) Start {
  int index;  // of the sequence, among those that have tokens
  int head;
  int tile;
  int count;  // tiles of the worker
  Sequence sequence;
  Sequence following;
};

// A (sequence, head) whose tiles lie in the CTAs first .. last.
struct alignas(16) Share {
  int first;
  int last;
  int row;
  int head;
};

// What the kernel that made the plan wrote, past the L1 cache; `Field` is whole accesses of 4 ints.
template <class Field>
DEVICE Field read(const Field* field) {
  static_assert(sizeof(Field) % 16 == 0, "whole accesses");
  Field result;
#pragma unroll
  for (int i = 0; i < int(sizeof(Field) / 16); ++i)
    reinterpret_cast<Pack<int, 4>*>(&result)[i] =
        load_fresh<4>(reinterpret_cast<const int*>(field) + i * 4);
  return result;
}
#if !SHARES
DEVICE Sequence read(const Sequence* sequence) {
  return {load_fresh<1>(&sequence->row).at[0], load_fresh<1>(&sequence->length).at[0]};
}
#endif

struct Plan {
  int* arrivals;        // [CTAs], zero between kernels: CTAs that have their part of what starts in this one
  Share* shares;        // [CTAs][2]: what an earlier CTA starts, what this one starts and does not end
  Start* starts;        // [CTAs * workers]
  Sequence* sequences;  // those that have tokens, and two more that are read but not used

  DEVICE Plan(int* memory, int num_ctas, int num_workers) {
    arrivals = memory;
    shares = reinterpret_cast<Share*>(memory + (num_ctas + 3) / 4 * 4);
    starts = reinterpret_cast<Start*>(shares + 2 * num_ctas);
    sequences = reinterpret_cast<Sequence*>(starts + num_ctas * num_workers);
  }
  // If SHARES.
  DEVICE Prefixes prefixes(int num_rows) const {
    return Prefixes(reinterpret_cast<int*>(sequences + num_rows + 2), num_rows);
  }
};
