// What rows of a decode batch share, found once a step: runs of tokens that lie in the same blocks of several rows, cut
// into items for CTAs. An item leaves a state for each of its query rows (the heads of its rows that share a kv head):
// the softmax over its tokens, which is merged with what follows.
#pragma once
#include "runtime/common.cuh"

enum {
  SHARED_TILE = 64,  // tokens
  LEVELS = 3,        // runs of a row, one after the other
  STATES_BITS = 5    // of the number of a row's states
};

// Tokens begin .. end of the row `leader` and of all members, ITEM_ROWS of their query rows.
struct alignas(16) Item {
  int leader;
  int begin;
  int end;
  int head;          // kv head
  int first_member;  // of the run
  int num_rows;      // query rows of the run: members times heads of the group
  int first_row;     // of the item, among them
  int state;         // among a row's states, that of this item
};

struct RowPrefix {
  int first_tile;  // with which its own part begins
  int states;      // the first, and in the low bits how many

  DEVICE int first_state() const { return states >> STATES_BITS; }
  DEVICE int num_states() const { return states & ((1 << STATES_BITS) - 1); }
};

struct Prefixes {
  int* num_items;   // 0: nothing is shared
  int* arrived;     // zero between kernels: items whose states are written
  int* left;        // zero between kernels: CTAs that wait for no item any more
  RowPrefix* rows;  // [rows]
  int* members;     // [LEVELS * rows]
  Item* items;

  DEVICE Prefixes(int* memory, int num_rows) {
    num_items = memory;
    arrived = memory + 1;
    left = memory + 2;
    rows = reinterpret_cast<RowPrefix*>(memory + 4);
    members = memory + 4 + 2 * (num_rows + num_rows % 2);
    items = reinterpret_cast<Item*>(members + LEVELS * ((num_rows + 3) / 4 * 4));
  }
};
