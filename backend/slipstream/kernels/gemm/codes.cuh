// Weights in fewer bits, as GEMMs read them: blocks of 16 rows of the weights and 128 inputs, whose codes lie in the
// order of A fragments of m16n8k16 (runtime/mma.cuh); `packing.py` says where each code is.
// -D ELEMENT (T: Half or BFloat16), BITS (4, 8), CODE_TYPE (INTEGERS; E2M1 of 4 bits, E4M3 of 8), SCALE (float, Half, BFloat16; T
// of e2m1), PARTS (1, 2, 4, 8: pieces of a block's inputs that have a scale each), ZEROS (0, 1: of integers), SCALED (0, 1:
// scales, which are T, multiply integers or e4m3, each rounded once, rather than sums; of records, scales and minimums of
// fp32), RECORD (of integers: what a part has in place of a scale, by `NUMBERS` of records.py; 0: a scale)
#pragma once
#ifndef RECORD
#define RECORD 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#include "runtime/copies.cuh"

using Scale = SCALE;

constexpr int INTEGERS = 0, E2M1 = 1, E4M3 = 2;
static_assert(CODE_TYPE == INTEGERS || (BITS == (CODE_TYPE == E2M1 ? 4 : 8) && !ZEROS), "floats have one size, and no zeros");
constexpr int BLOCK_INPUTS = 128;
constexpr int STEPS = BLOCK_INPUTS / 16;  // k-steps of fragments
constexpr int STEPS_A_PART = STEPS / PARTS;
// Sums of integers and of e4m3 are scaled; e2m1 times its scale is a number of 16 bits, so all sums of a block are one.
constexpr bool SCALES_NUMBERS = CODE_TYPE == E2M1 || SCALED;
constexpr int PAIR = 1, SHARED_UNITS = 2, HALVES = 3, WIDE = 4;  // records
constexpr bool MINIMUMS = RECORD == PAIR || RECORD == SHARED_UNITS || RECORD == WIDE;
constexpr int SCALES_A_PART = RECORD == HALVES || RECORD == WIDE ? 2 : 1;
static_assert(RECORD == 0 || (CODE_TYPE == INTEGERS && PARTS == 4 && !ZEROS), "a record is of 32 inputs");
constexpr int SUM_PARTS = SCALES_NUMBERS ? 1 : PARTS * SCALES_A_PART;
constexpr int STEPS_A_SUM = STEPS / SUM_PARTS;
constexpr int QUADS = BITS / 2;  // accesses of 16 bytes by which a lane gets its codes
constexpr int STEPS_A_QUAD = STEPS / QUADS;
constexpr int CODE_BYTES = QUADS * 512;
constexpr int SCALE_WORDS = RECORD == WIDE ? 2 : 1;  // of a record
constexpr int SCALE_BYTES = 16 * (RECORD == 0 ? sizeof(Scale) : SCALE_WORDS * 4);  // of a part
constexpr u32 LANES_A_PART = SCALE_BYTES / 16, SCALE_LANES = PARTS * LANES_A_PART;  // that copy scales
constexpr int ZERO_BYTES = ZEROS ? 16 : 0;       // of a part
constexpr int BLOCK_BYTES = CODE_BYTES + PARTS * (SCALE_BYTES + ZERO_BYTES);

template <class Element>
constexpr bool IS_FP16 = false;
template <>
constexpr bool IS_FP16<Half> = true;

// a b + c, in pairs.
DEVICE u32 fma_pairs(u32 a, u32 b, u32 c, Half) {
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
DEVICE u32 fma_pairs(u32 a, u32 b, u32 c, BFloat16) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
// Bits of `a` where `mask` has them, and those of `magic`: one instruction, which a compiler that knows both makes two.
DEVICE u32 masked_or(u32 a, u32 mask, u32 magic) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(magic));
  return result;
}
DEVICE u32 add_pairs(u32 a, u32 c) { return fma_pairs(a, IS_FP16<T> ? 0x3c003c00 : 0x3f803f80, c, T{}); }

// A code becomes the low bits of a number whose last place is 1: 1024 + code in fp16, 128 + code in bf16, to which this
// is added. 8 bits are one too many for bf16, whose highest bit is added apart. Every difference is exact.
DEVICE u32 minus_zero(u32 zero) {
  if constexpr (BITS == 8 && !IS_FP16<T>) return from_float<BFloat16>(128.0f - float(zero)).bits * 0x10001u;
  return ((IS_FP16<T> ? 0xe400u : 0xc300u) | zero) * 0x10001u;
}

// e2m1 becomes a number whose exponent is the least there is (2^126 or 2^14 too small); its scale makes up for that. The
// digits of register i lie at 3 i of each half, its sign at 12 + (i ^ 1): of bf16 two registers take one shift or none.
DEVICE u32 scaled_floats(u32 word, int i, u32 scale) {
  constexpr int PLACE = IS_FP16<T> ? 9 : 6;  // of its last bit
  constexpr u32 MASK = 0x00070007u << PLACE;
  const int shift = PLACE - 3 * i;
  const u32 digits = shift >= 0 ? word << shift : word >> -shift;
  return fma_pairs((word << (3 - (i ^ 1)) & 0x80008000) | (digits & MASK), scale, 0x80008000, T{});
}

// Two e4m3, the first or the second byte of each half of a word, exactly: with the exponent's bits where T has its lowest
// ones they are 2^120 or 2^8 too small, subnormal ones too. NaN becomes 480: packing makes its scale NaN.
DEVICE u32 from_e4m3(u32 word, bool second) {
  constexpr int PLACE = IS_FP16<T> ? 1 : 4;  // bits behind the sign
  constexpr u32 DIGITS = 0x7f007f00u >> PLACE;
  const u32 digits = second ? word >> PLACE : word << (8 - PLACE), signs = (second ? word : word << 8) & 0x80008000;
  return fma_pairs(masked_or(digits, DIGITS, signs), IS_FP16<T> ? 0x5c005c00 : 0x7b807b80, 0x80008000, T{});
}

// The numbers of a k-step, an A fragment; `low` is of row g, `high` of row g + 8: what `Block::operand` gives.
DEVICE void decode(u32 (&a)[4], const u32* words, u32 low, u32 high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 zero = i % 2 ? high : low;
    if constexpr (CODE_TYPE == E2M1) {
      a[i] = scaled_floats(words[0], i, zero);
    } else if constexpr (CODE_TYPE == E4M3) {
      a[i] = from_e4m3(words[i / 2], i % 2 != 0);
    } else if constexpr (BITS == 4) {
      constexpr u32 MAGIC = IS_FP16<T> ? 0x64006400 : 0x43004300;
      a[i] = add_pairs(masked_or(words[0] >> 4 * i, 0x000f000f, MAGIC), zero);
    } else if constexpr (IS_FP16<T>) {
      a[i] = add_pairs(masked_or(words[i / 2] >> 8 * (i % 2), 0x00ff00ff, 0x64006400), zero);
    } else {
      const u32 pair = words[i / 2] >> 8 * (i % 2);
      a[i] = add_pairs(masked_or(pair, 0x007f007f, 0x43004300), (pair & 0x00800080) ^ 0xc380c380);
      if (ZEROS) a[i] = add_pairs(a[i], zero);
    }
  }
}

// Bytes of `low` and `high` by the nibbles of a selector.
DEVICE u32 permute(u32 low, u32 high, u32 selector) {
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}
// Codes of 4 bits less 8 as e4m3, four of the lower half of a word and four of its upper half. Their lower three bits
// choose among eight bytes, once below zero and once from there on; the highest bit of each, spread over a byte, says which
// is meant.
DEVICE void decode_e4m3(u32 (&a)[2], u32 word) {
  const u32 index = word & 0x77777777, shifted = word << 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 selector = half == 0 ? index : index >> 16;
    const u32 below = permute(0xcaccced0, 0xb8c0c4c8, selector), above = permute(0x44403800, 0x4e4c4a48, selector);
    const u32 is_above = permute(word, shifted, half == 0 ? 0x9d8c : 0xbfae);
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(a[half]) : "r"(is_above), "r"(above), "r"(below));
  }
}

// Of a pair of numbers by a scale, with a minimum added: each rounded once.
DEVICE u32 rounded_pair(u32 pair, float scale, float minimum) {
  const T low{u16(pair)}, high{u16(pair >> 16)};
  return round_pair(to_float(low) * scale + minimum, to_float(high) * scale + minimum, T{});
}
// Of a pair of numbers by a pair of scales, each rounded.
DEVICE u32 scaled_pair(u32 pair, u32 scales) { return fma_pairs(pair, scales, 0x80008000, T{}); }

// The weights of a product in global memory.
struct Codes {
  const u8 *codes, *scales, *zeros;
  u32 num_blocks;  // of a row of the weights
  u32 num_groups;
  u32 group_factor;  // 2^31 over the parts of a group, rounded up

  DEVICE u32 group(u32 block, int part) const { return u32(u64(block * PARTS + part) * group_factor >> 31); }
  // By a warp: a block into shared memory.
  DEVICE void copy(u32 target, u32 tile, u32 block, u64 policy) const {
    const u32 lane = threadIdx.x % 32;
    const u8* source = codes + (u64(tile) * num_blocks + block) * CODE_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) copy_async(target + i * 512 + lane * 16, source + i * 512, true, policy);
    if (lane < SCALE_LANES) {
      const u64 at = u64(tile) * num_groups + group(block, lane / LANES_A_PART);
      copy_async_bytes<16>(target + CODE_BYTES + lane * 16, scales + at * SCALE_BYTES + lane % LANES_A_PART * 16, 16);
    }
    copy_zeros(target, tile, block);
  }
  // Its zeros alone, if there are any.
  DEVICE void copy_zeros(u32 target, u32 tile, u32 block) const {
    const u32 lane = threadIdx.x % 32;
    if (ZEROS && lane >= 32 - PARTS) {
      const u32 part = lane - (32 - PARTS);
      const u64 at = u64(tile) * num_groups + group(block, part);
      copy_async_bytes<16>(target + CODE_BYTES + PARTS * SCALE_BYTES + part * 16, zeros + at * 16, 16);
    }
  }
};

DEVICE u32 bits_of(float) { return 0; }  // no scale of numbers
template <class Element>
DEVICE u32 bits_of(Element value) {
  return value.bits;
}

// A block in shared memory, as a lane sees it. `codes` are followed by the scales and the zeros of its parts, or these lie
// where those of many blocks do, part p's as number of_part[p].
struct Block {
  const u8 *codes, *scales, *zeros;
  u32 of_part[PARTS];
  const u32 lane = threadIdx.x % 32, g = threadIdx.x % 32 / 4;

  DEVICE explicit Block(const u8* bytes)
      : codes(bytes), scales(bytes + CODE_BYTES), zeros(scales + PARTS * SCALE_BYTES) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) of_part[part] = part;
  }
  DEVICE Block(const Codes& weights, const u8* codes, const u8* scales, const u8* zeros, u32 block, u32 first_group,
               u32 as_lane = threadIdx.x % 32)
      : codes(codes), scales(scales), zeros(zeros), lane(as_lane), g(as_lane / 4) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) of_part[part] = weights.group(block, part) - first_group;
  }
  DEVICE Pack<u32, 4> quad(int i) const { return load<4>(reinterpret_cast<const u32*>(codes + i * 512 + lane * 16)); }
  // Of row g, and of row g + 8.
  DEVICE Scale stored_scale(int part, int high) const {
    return reinterpret_cast<const Scale*>(scales + of_part[part] * SCALE_BYTES)[g + 8 * high];
  }
  // Of sums.
  DEVICE float scale(int sum_part, int high) const {
    return SCALES_NUMBERS ? 1.0f : exact_scale(sum_part / SCALES_A_PART, sum_part % SCALES_A_PART, high);
  }
  // `half`: of a part's inputs, where both have scales.
  DEVICE float exact_scale(int part, int half, int high) const {
    if constexpr (RECORD == 0) {
      return to_float(stored_scale(part, high));
    } else {
      const u32 own = word(part, high);
      if constexpr (RECORD == PAIR) return upper_half(own << 16);
      if constexpr (RECORD == SHARED_UNITS) return upper_half(word(part / 2 * 2, high)) * float(own & 255);
      const float unit = upper_half(RECORD == HALVES ? own : word(part, high, 1) << 16);
      return unit * float(static_cast<signed char>(own >> 8 * half));
    }
  }
  // 0 where there are none.
  DEVICE float minimum(int part, int high) const {
    if constexpr (!MINIMUMS) return 0.0f;
    const u32 own = word(part, high);
    if constexpr (RECORD == PAIR) return upper_half(own);
    if constexpr (RECORD == SHARED_UNITS) return upper_half(word(part / 2 * 2 + 1, high)) * float(own >> 8 & 255);
    return upper_half(word(part, high, 1)) * float(own >> 16 & 255);
  }
  DEVICE u32 zero(int part, int high) const { return zeros[of_part[part] * 16 + g + 8 * high]; }
  DEVICE u32 scale_pair(int part, int high) const { return bits_of(stored_scale(part, high)) * 0x10001u; }
  DEVICE u32 operand(int part, int high) const {
    if constexpr (CODE_TYPE == E2M1) return scale_pair(part, high);
    if constexpr (!ZEROS) return minus_zero(BITS == 8 ? 128 : MINIMUMS ? 0 : 8);
    return minus_zero(zero(part, high));
  }

 private:
  // Of a record.
  DEVICE u32 word(int part, int high, int i = 0) const {
    return reinterpret_cast<const u32*>(scales + of_part[part] * SCALE_BYTES)[(g + 8 * high) * SCALE_WORDS + i];
  }
  static DEVICE float upper_half(u32 word) { return to_float(Half{u16(word >> 16)}); }
};
