// The plan of decode attention, made once a step: which tiles every worker (a warp of the grid) attends to.
//
// A tile is TILE tokens of one (sequence, head); a head stands for the query heads that share a kv head, or for some
// of them where they are many. Tiles lie in the order sequence, head, token: each CTA gets a run of them, each
// worker a run of its CTA's.
#pragma once
#include "common.cuh"

constexpr int TILE = 32;

struct alignas(8) Sequence {
  int row;  // of the batch
  int length;
};

// The first tile of a worker, and what it must know to go on from there.
struct alignas(16) Start {
  int index;  // of the sequence, among those that have tokens
  int head;
  int tile;
  int count;  // tiles of the worker
  Sequence sequence;
  Sequence following;
};

constexpr int NO_TILES = -1;

struct Plan {
  int* first_ctas;      // of each CTA: where the (sequence, head) of its first tile starts, or NO_TILES
  Start* starts;        // [CTAs * workers]
  Sequence* sequences;  // those that have tokens, and two more that are read but not used
  int* parts;           // one for each CTA (decode_merge.cuh), EMPTY between kernels

  DEVICE Plan(int* memory, int num_ctas, int num_workers, int num_rows) {
    first_ctas = memory;
    starts = reinterpret_cast<Start*>(memory + (num_ctas + 3) / 4 * 4);
    sequences = reinterpret_cast<Sequence*>(starts + num_ctas * num_workers);
    parts = reinterpret_cast<int*>(sequences + (num_rows + 3) / 2 * 2);
  }
};
