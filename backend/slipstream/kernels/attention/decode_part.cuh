// What is left of some tiles of one (sequence, kv head) for up to 8 query heads.
// -D ELEMENT (T: 16 bits), HEAD_SIZE
#pragma once
#include "attention/decode_ring.cuh"

constexpr int COLUMNS = 8;

// What a worker, or a CTA, has of a (sequence, head): sums of V by exponentials, their base-2 maximum, their total.
struct alignas(16) Part {
  float output[COLUMNS][HEAD_SIZE + 4];  // padded against bank conflicts
  float maximum[COLUMNS];
  float total[COLUMNS];
};

// What a query head has of tokens that its sequence shares with others: the same of one column.
struct alignas(16) State {
  float output[HEAD_SIZE];
  float maximum;
  float total;
  float unused[2];
};
