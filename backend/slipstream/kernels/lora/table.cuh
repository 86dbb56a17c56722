// Where a step's adapters are, as its tables in device memory say (terms.py, `Table`).
// -D ELEMENT (T, 16 bits)
#pragma once
#include "runtime/common.cuh"

constexpr int RANKS = 16;  // of a tile
constexpr int PLACE_PARTS = 3;  // matrices of a place
constexpr int WORDS = 6;   // of a term

// Rows `begin` to `begin + count` of the step's list have the adapter of these terms; null: none. No rows: the group is
// empty, and so are those behind it.
struct Group {
  const i64* terms;
  int begin, count;

  DEVICE static Group none() { return {nullptr, 0, 0}; }
  DEVICE static Group of(const i64* groups, i64 number) {
    const Pack<i64, 2> found = load_fresh<2>(groups + 2 * number);
    return {reinterpret_cast<const i64*>(found.at[0]), int(found.at[1] & 0xffffffff), int(found.at[1] >> 32)};
  }
};

// What a CTA has to know of the term that one part of a place has for a group; in tiles of 16 ranks, each somewhere: of
// A `[16, inputs]`, of B `[outputs, 16]`.
struct Term {
  const T* first;     // tile, of A or of B
  const i64* tiles;   // of each 16 ranks: where A's is, where B's is
  int begin, count;   // of the group
  int rank, column;   // 0: there is no term; its first column of t

  DEVICE static Term none() { return {nullptr, nullptr, 0, 0, 0, 0}; }
  DEVICE static Term of(const Group& group, i64 place, int part, int which) {
    if (group.terms == nullptr) return {nullptr, nullptr, group.begin, group.count, 0, 0};
    const i64* at = group.terms + (place * PLACE_PARTS + part) * WORDS;
    const Pack<i64, 2> found = load_fresh<2>(at), sizes = load_fresh<2>(at + 2), firsts = load_fresh<2>(at + 4);
    const T* first = reinterpret_cast<const T*>(firsts.at[which]);
    return {first, group.terms + found.at[0], group.begin, group.count, int(sizes.at[0]), int(sizes.at[1])};
  }
  // From rank `rank` on, of A (0) or B (1); `known` of the one that `of` has looked up.
  DEVICE const T* tile(int rank, int which) const {
    return reinterpret_cast<const T*>(load_fresh<1>(tiles + rank / RANKS * 2 + which).at[0]);
  }
  DEVICE const T* known(int rank, int which) const { return rank == 0 ? first : tile(rank, which); }
};
