// The two parts of a decode step that memory bandwidth limits, on a CPU: products of a few tokens and a weight matrix,
// and attention of a single query to the cache. Weights, keys and values are read from memory once, in order, and
// prefetched; with several tokens or query heads, they are read again from the processor's cache.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

using at::BFloat16;
using at::Tensor;

constexpr int AHEAD = 16384;  // distance in bytes between the prefetched weights and the weights in use
#ifdef __AVX512F__
constexpr int LANES = 16;  // number of sums in a vector
#else
constexpr int LANES = 8;
#endif
#define INLINE static inline __attribute__((always_inline))  // so that sums stay in registers

using Sums = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

template <class T>
constexpr int WIDTH = LANES;  // number of values that `load` reads

INLINE Sums load(const float* from) {
  using Unaligned = float __attribute__((vector_size(4 * LANES), aligned(4)));
  return *reinterpret_cast<const Unaligned*>(from);
}

// bf16 that is multiplied in fp32 on every processor: a head is often narrower than the vectors of AVX512-BF16.
struct WideBF16 {
  BFloat16 value;
  operator float() const { return value; }
};

INLINE Sums load(const WideBF16* from) {  // bf16 is the upper half of fp32
  using Unaligned = uint16_t __attribute__((vector_size(2 * LANES), aligned(2)));
  return (Sums)(__builtin_convertvector(*reinterpret_cast<const Unaligned*>(from), Ints) << 16);
}

INLINE void store(float* to, Sums sums) {
  using Unaligned = float __attribute__((vector_size(4 * LANES), aligned(4)));
  *reinterpret_cast<Unaligned*>(to) = sums;
}

INLINE Sums add(Sums sums, Sums a, Sums b) { return sums + a * b; }

#ifdef __AVX512BF16__  // `add` adds two products to each sum
template <>
constexpr int WIDTH<BFloat16> = 2 * LANES;

INLINE __m512bh load(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

INLINE Sums add(Sums sums, __m512bh a, __m512bh b) { return (Sums)_mm512_dpbf16_ps((__m512)sums, a, b); }
#else
INLINE Sums load(const BFloat16* from) { return load(reinterpret_cast<const WideBF16*>(from)); }
#endif

// int8 products are summed in int32. OFFSET is added to each weight, and the sums are corrected for it.
#ifdef __AVX512VNNI__  // `add` adds four products of an unsigned and a signed number to each sum
#define HAS_INT8
constexpr int OFFSET = 128;
template <>
constexpr int WIDTH<int8_t> = 4 * LANES;

INLINE __m512i load(const int8_t* from) { return _mm512_loadu_si512(from); }

INLINE __m512i load_part(const int8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, from);
}

INLINE __m512i add_offset(__m512i weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(-128)); }

INLINE Ints add(Ints sums, __m512i a, __m512i b) { return (Ints)_mm512_dpbusd_epi32((__m512i)sums, a, b); }
#elif defined(__AVX512BW__)  // `add` adds two int16 products to each sum
#define HAS_INT8
constexpr int OFFSET = 0;
template <>
constexpr int WIDTH<int8_t> = 2 * LANES;

INLINE __m512i load(const int8_t* from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from)); }

INLINE Ints add(Ints sums, __m512i a, __m512i b) { return sums + (Ints)_mm512_madd_epi16(a, b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)  // the same with half the lanes
#define HAS_INT8
constexpr int OFFSET = 0;
template <>
constexpr int WIDTH<int8_t> = 2 * LANES;

INLINE __m256i load(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }

INLINE Ints add(Ints sums, __m256i a, __m256i b) { return sums + (Ints)_mm256_madd_epi16(a, b); }
#endif

template <class Vector>
INLINE Vector add_offset(Vector weights) {
  return weights;
}

// Load `count` values, fewer than WIDTH, followed by zeros.
template <class T>
INLINE auto load_part(const T* from, int64_t count) {
  T padded[WIDTH<T>] = {};
  std::copy_n(from, count, padded);
  return load(padded);
}

#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC before 12
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Concatenate a and b, and add up each block of 2 * BLOCK lanes into BLOCK lanes.
template <int BLOCK, class Vector, int... LANE>
INLINE Vector fold(Vector a, Vector b, std::integer_sequence<int, LANE...>) {
  return SHUFFLE(a, b, (LANE / BLOCK * 2 * BLOCK + LANE % BLOCK)...) +
         SHUFFLE(a, b, (LANE / BLOCK * 2 * BLOCK + LANE % BLOCK + BLOCK)...);
}

// LANES vectors -> one vector with the sum of each, in about LANES additions instead of LANES squared
template <int BLOCK = LANES / 2, class Vector>
INLINE Vector add_lanes(const Vector* vectors) {
  Vector folded[BLOCK];
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK; i++)
    folded[i] = fold<BLOCK>(vectors[2 * i], vectors[2 * i + 1], std::make_integer_sequence<int, LANES>());
  if constexpr (BLOCK == 1) return folded[0];
  else return add_lanes<BLOCK / 2>(folded);
}

// The product y (tokens, outputs) of inputs x (tokens, k) and weights w (outputs, k), whose rows are `stride` apart. If
// x and w are int8, each of their rows has a scale.
template <class T, class Y, class X = T>
struct Product {
  const T* w;
  const X* x;
  Y* y;
  int64_t tokens, k, outputs, stride;
  const Y* w_scale = nullptr;            // (outputs,)
  const float* x_scale = nullptr;        // (tokens,)
  const int32_t* x_correction = nullptr;  // (tokens,): OFFSET times the sum of each row of x
};

// Load the first COUNT lanes from memory, and set the others to 0.
template <int COUNT, class Vector, class T>
INLINE Vector load_lanes(const T* from) {
  Vector vector = {};
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; i++) vector[i] = from[i];
  return vector;
}

// Correct the int32 sums of a tile for OFFSET, and multiply them by the scales of x and w. Lane token * ROWS + row
// holds the sum for this row of w and this row of x.
template <int ROWS, int TOKENS, class Y, int... LANE>
INLINE Sums apply_scales(Ints products, const Product<int8_t, Y>& p, int64_t row, int64_t token,
                         std::integer_sequence<int, LANE...>) {
  Ints correction = load_lanes<TOKENS, Ints>(p.x_correction + token);
  Sums x_scale = load_lanes<TOKENS, Sums>(p.x_scale + token);
  Sums w_scale = load_lanes<ROWS, Sums>(p.w_scale + row);
  products -= SHUFFLE(correction, correction, (LANE / ROWS % TOKENS)...);
  x_scale = SHUFFLE(x_scale, x_scale, (LANE / ROWS % TOKENS)...);
  w_scale = SHUFFLE(w_scale, w_scale, (LANE % ROWS)...);
  return __builtin_convertvector(products, Sums) * (x_scale * w_scale);
}

// Multiply ROWS rows of w, starting at `row`, by TOKENS rows of x, starting at `token`.
template <int ROWS, int TOKENS, bool IS_FIRST, class T, class Y, class X>
void tile(const Product<T, Y, X>& p, int64_t row, int64_t token) {
  constexpr bool IS_INT8 = std::is_same_v<T, int8_t>;
  const int64_t k = p.k;
  const T* w = p.w + row * p.stride;
  const X* x = p.x + token * k;
  std::conditional_t<IS_INT8, Ints, Sums> sums[LANES] = {};
  auto add_products = [&](auto load_at) __attribute__((always_inline)) {
    decltype(load(w)) weights[ROWS];
    // Unrolled, so that the sums stay in registers.
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) weights[row] = add_offset(load_at(w + row * p.stride));
#pragma GCC unroll 16
    for (int token = 0; token < TOKENS; token++) {
      auto inputs = load_at(x + token * k);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) {
        auto& sum = sums[token * ROWS + row];
        sum = add(sum, weights[row], inputs);
      }
    }
  };

  const char* ahead = reinterpret_cast<const char*>(w) + AHEAD;
  int64_t i = 0;
  for (; i + WIDTH<T> <= k; i += WIDTH<T>) {
    if (IS_FIRST)
      for (size_t byte = 0; byte < ROWS * WIDTH<T> * sizeof(T); byte += 64) __builtin_prefetch(ahead + byte);
    ahead += ROWS * WIDTH<T> * sizeof(T);
    add_products([&](const auto* from) __attribute__((always_inline)) { return load(from + i); });
  }
  if (i < k) add_products([&](const auto* from) __attribute__((always_inline)) { return load_part(from + i, k - i); });

  auto total = add_lanes(sums);
  Y rounded[LANES];
  if constexpr (IS_INT8) {
    Sums scaled = apply_scales<ROWS, TOKENS>(total, p, row, token, std::make_integer_sequence<int, LANES>());
    for (int lane = 0; lane < LANES; lane++) rounded[lane] = scaled[lane];
  } else {
    for (int lane = 0; lane < LANES; lane++) rounded[lane] = total[lane];
  }
  for (int t = 0; t < TOKENS; t++) std::copy_n(rounded + t * ROWS, ROWS, p.y + (token + t) * p.outputs + row);
}

// Only the tiles of the first tokens prefetch weights; the other tiles find them in the cache.
template <int ROWS, bool PREFETCHES = true, class T, class Y, class X>
void rows(const Product<T, Y, X>& p, int64_t row) {
  constexpr int TILE_ROWS = std::min(ROWS, LANES / 4);  // so that the sums of 4 tokens fit into the registers
  int64_t token = 0;
  for (; token + 4 <= p.tokens; token += 4)
    for (int part = 0; part < ROWS; part += TILE_ROWS)
      if (PREFETCHES && token == 0) tile<TILE_ROWS, 4, true>(p, row + part, token);
      else tile<TILE_ROWS, 4, false>(p, row + part, token);
  for (; token < p.tokens; token++)
    if (PREFETCHES && token == 0) tile<ROWS, 1, true>(p, row, token);
    else tile<ROWS, 1, false>(p, row, token);
}

template <class T, class Y>
void multiply(const Product<T, Y>& p) {
  at::parallel_for(0, p.outputs, std::max<int64_t>(8, 32768 / p.k), [&](int64_t row, int64_t end) {
    for (; row + 8 <= end; row += 8) rows<8>(p, row);
    for (; row < end; row++) rows<1>(p, row);
  });
}

Tensor empty_result(const Tensor& x, const Tensor& w) {
  TORCH_CHECK(x.is_contiguous() && w.is_contiguous() && w.dim() == 2 && x.size(-1) == w.size(1));
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  return at::empty(shape, x.options());
}

template <class T>
Tensor multiply_floats(const Tensor& x, const Tensor& w) {
  Tensor y = empty_result(x, w);
  const int64_t k = w.size(1);
  multiply<T, T>({w.const_data_ptr<T>(), x.const_data_ptr<T>(), y.mutable_data_ptr<T>(), x.numel() / k, k, w.size(0),
                  k});
  return y;
}

// x (..., k) and w (n, k), both fp32 or both bf16, contiguous -> (..., n), summed in fp32
Tensor matvec(const Tensor& x, const Tensor& w) {
  TORCH_CHECK(x.scalar_type() == w.scalar_type());
  return x.scalar_type() == at::kBFloat16 ? multiply_floats<BFloat16>(x, w) : multiply_floats<float>(x, w);
}

#ifdef HAS_INT8  // other processors use torch's kernel
// Round each row of x (tokens, k) to int8, with the scale that maps its largest absolute value to 127. A row that is
// not finite has a scale of inf or NaN and levels of 0, so its products are NaN.
template <class Y>
void quantize(const Y* x, int64_t tokens, int64_t k, int8_t* levels, float* scale, int32_t* correction) {
  for (int64_t token = 0; token < tokens; token++) {
    // Without the sign bit, floats have the same order as their bits read as integers, and NaN is the largest.
    // Compilers vectorize a maximum of integers.
    int32_t largest = std::bit_cast<int32_t>(1e-30f);
    for (int64_t i = 0; i < k; i++)
      largest = std::max(largest, std::bit_cast<int32_t>(float(x[token * k + i])) & 0x7fffffff);
    const float inverse = 127 / std::bit_cast<float>(largest);
    scale[token] = std::bit_cast<float>(largest) / 127;

    int32_t sum = 0;
    for (int64_t i = 0; i < k; i++) {
      // After this addition, the last bits of the float are the nearest integer.
      const float shifted = float(x[token * k + i]) * inverse + 12582912.0f;
      const int8_t level = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(12582912.0f);
      levels[token * k + i] = level;
      sum += level;
    }
    correction[token] = OFFSET * sum;
  }
}

template <class Y>
Tensor multiply_int8(const Tensor& x, const Tensor& w, const Tensor& w_scale) {
  Tensor y = empty_result(x, w);
  const int64_t k = w.size(1), tokens = x.numel() / k;
  TORCH_CHECK(k <= 1 << 16);  // 255 * 127 * k fits into int32
  std::vector<int8_t> levels(x.numel());
  std::vector<float> scale(tokens);
  std::vector<int32_t> correction(tokens);
  quantize(x.const_data_ptr<Y>(), tokens, k, levels.data(), scale.data(), correction.data());
  multiply<int8_t, Y>({w.const_data_ptr<int8_t>(), levels.data(), y.mutable_data_ptr<Y>(), tokens, k, w.size(0), k,
                       w_scale.const_data_ptr<Y>(), scale.data(), correction.data()});
  return y;
}

// x (..., k) in fp32 or bf16, w (n, k) in int8 and w_scale (n,) in the dtype of x, contiguous -> (..., n). Each row of
// x is rounded to int8.
Tensor matvec_int8(const Tensor& x, const Tensor& w, const Tensor& w_scale) {
  TORCH_CHECK(w_scale.is_contiguous() && w_scale.dim() == 1 && w_scale.size(0) == w.size(0));
  TORCH_CHECK(x.scalar_type() == w_scale.scalar_type());
  return x.scalar_type() == at::kBFloat16 ? multiply_int8<BFloat16>(x, w, w_scale)
                                          : multiply_int8<float>(x, w, w_scale);
}
#endif

// Attention of a single query per row. The slots of the cache are divided into chunks, so that threads can share a row,
// and the results of the chunks are combined (2205.14135). The result does not depend on the number of threads.
constexpr int64_t CHUNK = 128;
constexpr int64_t GROUP = 8;  // slots that are read together
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();  // score of a slot that is not visible

// A chunk's highest score for a query head, and the sum of its weights, which are relative to this score.
struct Part {
  float highest = HIDDEN;  // score
  float total = 0;         // sum of the weights
};

// e^x for x <= 0, to within 1e-6; 0 for x < -87, near the smallest normal number
INLINE Sums exponential(Sums x) {
  // x = n ln 2 + r with an integer n, and |r| < 0.35. After the addition, the last bits of the float are n.
  const Sums shifted = x * 1.44269504f + 12582912.0f;
  const Sums n = shifted - 12582912.0f;
  const Sums r = x - n * 0.693359375f + n * 2.12194440e-4f;
  const Sums power = 1 + r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r / 720)))));
  const Sums two_to_n = (Sums)(((Ints)shifted << 23) + std::bit_cast<int32_t>(1.0f));
  return x < -87.0f ? Sums{} : power * two_to_n;
}

// Turn a chunk's scores into weights. Slots that are not visible, and slots from `count` on, get a weight of 0.
template <class Visible>
void apply_softmax(float* scores, float scale, int64_t count, const Visible& is_visible, Part& part) {
  for (int64_t slot = 0; slot < CHUNK; slot++) {
    scores[slot] = slot < count && is_visible(slot) ? scores[slot] * scale : HIDDEN;
    part.highest = std::max(part.highest, scores[slot]);
  }
  const float base = std::max(part.highest, std::numeric_limits<float>::lowest());  // finite
  Sums totals = {};
  for (int64_t slot = 0; slot < CHUNK; slot += LANES) {
    const Sums weights = exponential(load(scores + slot) - base);
    store(scores + slot, weights);
    totals += weights;
  }
  for (int lane = 0; lane < LANES; lane++) part.total += totals[lane];
}

// Prefetch one of `heads` parts of the group of slots after the one at `from`, so that memory is read during products.
template <class T>
INLINE void prefetch_part(const T* from, int64_t stride, int64_t head, int64_t heads) {
  const int64_t count = GROUP * stride / heads;
  const T* part = from + GROUP * stride + head * count;
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(part + i);
}

// Add the values (count, width) of up to GROUP slots, with the weights (heads, CHUNK) of the query heads that share
// them, to `sums` (heads, width). The weights of missing slots are 0.
template <class T>
void add_values(const T* values, int64_t stride, int64_t count, int64_t width, int64_t heads, const float* weights,
                float* sums) {
  const T* of_slot[GROUP];
  for (int64_t slot = 0; slot < GROUP; slot++) of_slot[slot] = values + std::min(slot, count - 1) * stride;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    Sums vectors[GROUP];
#pragma GCC unroll 8
    for (int64_t slot = 0; slot < GROUP; slot++) vectors[slot] = load(of_slot[slot] + i);
    for (int64_t head = 0; head < heads; head++) {
      Sums sum = load(sums + head * width + i);
#pragma GCC unroll 8
      for (int64_t slot = 0; slot < GROUP; slot++) sum += weights[head * CHUNK + slot] * vectors[slot];
      store(sums + head * width + i, sum);
    }
  }
  for (; i < width; i++)
    for (int64_t head = 0; head < heads; head++)
      for (int64_t slot = 0; slot < GROUP; slot++)
        sums[head * width + i] += weights[head * CHUNK + slot] * float(of_slot[slot][i]);
}

template <class T, class Stored>
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, float scale) {
  const Tensor q_fp32 = q.to(at::kFloat).contiguous();
  const auto queries = q_fp32.accessor<const float, 3>();
  const auto keys = k.accessor<const Stored, 4>(), values = v.accessor<const Stored, 4>();
  const auto visible = mask.accessor<const bool, 3>();
  const int64_t batch = q.size(0), heads = q.size(1), width = q.size(2);
  const int64_t slots = k.size(1), key_heads = k.size(2), value_width = v.size(3);
  const int64_t chunks = (slots + CHUNK - 1) / CHUNK, sharing = heads / key_heads;
  auto pointer = [](const auto& features) { return reinterpret_cast<const T*>(features.data()); };

  // The sum of the weighted values (F,) and the Part, for each row, chunk and query head.
  std::vector<float> sums(batch * chunks * heads * value_width);
  std::vector<Part> parts(batch * chunks * heads);
  at::parallel_for(0, batch * chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(heads * CHUNK);
    for (int64_t chunk = begin; chunk < end; chunk++) {
      const int64_t row = chunk / chunks, first = chunk % chunks * CHUNK, chunk_end = std::min(first + CHUNK, slots);

      // Scores. All heads of a few slots come before the next slots, in memory order.
      for (int64_t slot = first; slot < chunk_end; slot += GROUP) {
        const int64_t count = std::min(GROUP, chunk_end - slot);
        for (int64_t head = 0; head < key_heads; head++) {
          prefetch_part(pointer(keys[row][slot]), keys.stride(1), head, key_heads);
          const int64_t query_head = head * sharing;
          const Product<T, float, float> p{
              pointer(keys[row][slot][head]), queries[row][query_head].data(),
              &scores[query_head * CHUNK + slot - first], sharing, width, CHUNK, keys.stride(1)};
          if (count == GROUP) rows<GROUP, false>(p, 0);
          else for (int64_t i = 0; i < count; i++) rows<1, false>(p, i);
        }
      }
      for (int64_t head = 0; head < heads; head++) {
        auto is_visible = [&](int64_t slot) { return visible[row][head][first + slot]; };
        apply_softmax(&scores[head * CHUNK], scale, chunk_end - first, is_visible, parts[chunk * heads + head]);
      }

      // Weighted sums of values, in the same order.
      for (int64_t slot = first; slot < chunk_end; slot += GROUP) {
        const int64_t count = std::min(GROUP, chunk_end - slot);
        for (int64_t head = 0; head < key_heads; head++) {
          prefetch_part(pointer(values[row][slot]), values.stride(1), head, key_heads);
          const int64_t query_head = head * sharing;
          add_values(pointer(values[row][slot][head]), values.stride(1), count, value_width, sharing,
                     &scores[query_head * CHUNK + slot - first],
                     &sums[(chunk * heads + query_head) * value_width]);
        }
      }
    }
  });

  // Combine the chunks of each query head.
  Tensor y = at::empty({batch, heads, value_width}, q_fp32.options());
  auto result = y.accessor<float, 3>();
  std::vector<float> sum(value_width);
  for (int64_t index = 0; index < batch * heads; index++) {
    const int64_t row = index / heads, head = index % heads;
    auto index_of = [&](int64_t chunk) { return (row * chunks + chunk) * heads + head; };
    float highest = HIDDEN, total = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) highest = std::max(highest, parts[index_of(chunk)].highest);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const Part& part = parts[index_of(chunk)];
      const float* values = &sums[index_of(chunk) * value_width];
      const float weight = std::exp(part.highest - highest);
      total += weight * part.total;
      for (int64_t i = 0; i < value_width; i++) sum[i] += weight * values[i];
    }
    for (int64_t i = 0; i < value_width; i++) result[row][head][i] = sum[i] / total;
  }
  return y.to(q.scalar_type());
}

// q (B, H, E), k (B, S, K, E) and v (B, S, K, F), all in fp32 or all in bf16, and mask (B, H, S), true where visible ->
// (B, H, F). The features of keys and values are contiguous.
Tensor decode_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, double scale) {
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type());
  TORCH_CHECK(k.sizes().slice(0, 3) == v.sizes().slice(0, 3) && k.numel() > 0 && v.numel() > 0);
  TORCH_CHECK(q.size(0) == k.size(0) && q.size(1) % k.size(2) == 0 && q.size(2) == k.size(3));
  TORCH_CHECK(mask.size(0) == q.size(0) && mask.size(1) == q.size(1) && mask.size(2) == k.size(1));
  TORCH_CHECK(k.stride(3) == 1 && v.stride(3) == 1);
  if (k.scalar_type() == at::kBFloat16) return attend<WideBF16, BFloat16>(q, k, v, mask, scale);
  return attend<float, float>(q, k, v, mask, scale);
}

TORCH_LIBRARY(attend, library) {
  library.def("matvec(Tensor x, Tensor w) -> Tensor");
  library.def("decode_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor");
#ifdef HAS_INT8
  library.def("matvec_int8(Tensor x, Tensor w, Tensor w_scale) -> Tensor");
#endif
}
TORCH_LIBRARY_IMPL(attend, CPU, library) {
  library.impl("matvec", matvec);
  library.impl("decode_attention", decode_attention);
#ifdef HAS_INT8
  library.impl("matvec_int8", matvec_int8);
#endif
}
