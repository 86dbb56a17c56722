// The rows of a step of decodes, and their heads as the plan has them.
// -D ELEMENT (T: 16 bits), HEAD_SIZE, ROTATES, SINKS, FORMAT (of the cache: kv_format.cuh)
#pragma once
#include "cache/kv_format.cuh"
#if FORMAT == 0
#include "attention/decode_columns.cuh"
#elif FORMAT == INT4
#include "attention/decode_int4.cuh"
#else
#include "attention/decode_bytes.cuh"
#endif

// The heads of the plan: each kv head `parts` times, with at most `width` of its query heads.
struct Heads {
  int count;
  int parts;
  int width;
  int group;  // query heads of a kv head

  DEVICE Heads(int num_kv_heads, int group)
      : parts((group + COLUMNS - 1) / COLUMNS), width((group + parts - 1) / parts), group(group) {
    count = num_kv_heads * parts;
  }
  DEVICE int first_query(int head) const { return head / parts * group + head % parts * width; }
  DEVICE int all_queries() const { return count / parts * group; }
  DEVICE int num_queries(int head) const { return min(width, group - head % parts * width); }
};

struct Output {
  T* rows;  // [row, query head, HEAD_SIZE]
  i64 row_elements;

  DEVICE T* at(const Heads& heads, int row, int head) const {
    return rows + row * row_elements + heads.first_query(head) * HEAD_SIZE;
  }
};

// The rows of a step: one token for each sequence.
struct Inputs {
  const T* q;
  i64 q_stride;
  const T* k;  // from here on only if ROTATES
  i64 k_stride;
  const T* v;
  i64 v_stride;
  const float* cos_sin;      // [position, HEAD_SIZE]: cosines, then sines; if SINKS [row, HEAD_SIZE]
  const float* sink_angles;  // the same, by which a rotated query is turned further for sinks; if SINKS

  // Of the newest token of a sequence.
  DEVICE const float* angles(const Sequence& sequence) const {
    return cos_sin + i64(SINKS ? sequence.row : sequence.length - 1) * HEAD_SIZE;
  }
};
