// Puts together what several CTAs have of an item that is cut into parts: two by two, then by fours, and so on, each
// warp with those that have the same rows. The later of two adds up both, so nobody waits; a sum of two has the same
// bits in either order, so equal launches give equal bits.
// -D ELEMENT (T: Half or BFloat16), HEAD_SIZE (64, 128, 256), TILE, SPLITS
#pragma once
#include "attention/sm90/prefill_rows.cuh"

#if SPLITS

constexpr int WARP_ROWS = 16, ITEM_WARPS = ITEM_ROWS / WARP_ROWS;

// Whether the warp is the second to come here. The second reads what the first has written before.
DEVICE bool arrives_second(u32* arrivals) {
  __threadfence();
  __syncwarp();
  u32 before = 0;
  if (threadIdx.x % 32 == 0) before = atomicInc(arrivals, 1);  // back to zero
  before = __shfl_sync(ALL_LANES, before, 0);
  __threadfence();
  return before == 1;
}

// `rows` are of a part; all lanes of warp `warp` of those that multiply. True if it is the last of the item's: then
// they are of all parts.
DEVICE bool merge(const Arguments& a, const Item& item, int warp, GroupRows& rows) {
  if (item.first_row + warp * WARP_ROWS >= item.num_rows) return false;
  float* const places = a.parts + i64(item.first_part * ITEM_WARPS + warp) * GroupRows::PART_FLOATS;
  u32* const arrivals = a.counters + 1 + item.first_part * ITEM_WARPS + warp;
  for (int width = 1; width < item.parts; width *= 2) {
    const int mine = item.part & -width, other = mine ^ width;  // first parts of those that are put together
    if (other >= item.parts) continue;
    rows.store_part(places + i64(mine) * ITEM_WARPS * GroupRows::PART_FLOATS);
    if (!arrives_second(arrivals + max(mine, other) * ITEM_WARPS)) return false;
    rows.add_part(places + i64(other) * ITEM_WARPS * GroupRows::PART_FLOATS, a.scale);
  }
  return true;
}
#endif
