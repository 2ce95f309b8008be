// A few tokens times a matrix, on a CPU: every weight is read once, in order, asked for ahead of its use.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using at::BFloat16;
using at::Tensor;

constexpr int AHEAD = 16384;  // bytes between what is asked for and what is used
#ifdef __AVX512F__
constexpr int LANES = 16;  // sums of a vector
#else
constexpr int LANES = 8;
#endif
#define INLINE static inline __attribute__((always_inline))  // else sums would go through memory

using Sums = float __attribute__((vector_size(4 * LANES)));

INLINE Sums load(const float* from) {
  using Unaligned = float __attribute__((vector_size(4 * LANES), aligned(4)));
  return *reinterpret_cast<const Unaligned*>(from);
}

INLINE Sums add(Sums sums, Sums a, Sums b) { return sums + a * b; }

#ifdef __AVX512BF16__  // two products for each sum
INLINE __m512bh load(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

INLINE Sums add(Sums sums, __m512bh a, __m512bh b) { return (Sums)_mm512_dpbf16_ps((__m512)sums, a, b); }
#else  // the upper half of an fp32
INLINE Sums load(const BFloat16* from) {
  using Unaligned = uint16_t __attribute__((vector_size(2 * LANES), aligned(2)));
  using Ints = int32_t __attribute__((vector_size(4 * LANES)));
  return (Sums)(__builtin_convertvector(*reinterpret_cast<const Unaligned*>(from), Ints) << 16);
}
#endif

#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC before 12
using Indices = int32_t __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Indices{__VA_ARGS__})
#endif

// the vectors of a and then of b, each block of 2 * BLOCK lanes added up to BLOCK lanes
template <int BLOCK, int... LANE>
INLINE Sums fold(Sums a, Sums b, std::integer_sequence<int, LANE...>) {
  return SHUFFLE(a, b, (LANE / BLOCK * 2 * BLOCK + LANE % BLOCK)...) +
         SHUFFLE(a, b, (LANE / BLOCK * 2 * BLOCK + LANE % BLOCK + BLOCK)...);
}

// LANES vectors -> a vector of the sums of each, in about LANES additions instead of LANES squared
template <int BLOCK = LANES / 2>
INLINE Sums add_lanes(const Sums* vectors) {
  Sums folded[BLOCK];
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK; i++)
    folded[i] = fold<BLOCK>(vectors[2 * i], vectors[2 * i + 1], std::make_integer_sequence<int, LANES>());
  if constexpr (BLOCK == 1) return folded[0];
  else return add_lanes<BLOCK / 2>(folded);
}

// ROWS rows of k weights times TOKENS rows of k inputs: y[token * outputs + row]
template <int ROWS, int TOKENS, bool IS_FIRST, class T>
void tile(const T* w, const T* x, int64_t k, int64_t outputs, T* y) {
  using Vector = decltype(load(w));
  constexpr int WIDTH = sizeof(Vector) == 4 * LANES && !std::is_same_v<Vector, Sums> ? 2 * LANES : LANES;
  Sums sums[LANES] = {};
  auto add_products = [&](const T* w, const T* x, int64_t stride) __attribute__((always_inline)) {
    Vector weights[ROWS];
    for (int row = 0; row < ROWS; row++) weights[row] = load(w + row * stride);
    for (int token = 0; token < TOKENS; token++) {
      Vector inputs = load(x + token * stride);
      for (int row = 0; row < ROWS; row++) {
        Sums& sum = sums[token * ROWS + row];
        sum = add(sum, weights[row], inputs);
      }
    }
  };

  const char* ahead = reinterpret_cast<const char*>(w) + AHEAD;
  int64_t i = 0;
  for (; i + WIDTH <= k; i += WIDTH) {
    if (IS_FIRST)
      for (size_t byte = 0; byte < ROWS * WIDTH * sizeof(T); byte += 64) __builtin_prefetch(ahead + byte);
    ahead += ROWS * WIDTH * sizeof(T);
    add_products(w + i, x + i, k);
  }
  if (i < k) {  // the rest, followed by zeros
    T last_w[ROWS * WIDTH] = {}, last_x[TOKENS * WIDTH] = {};
    for (int row = 0; row < ROWS; row++) std::copy(w + row * k + i, w + row * k + k, last_w + row * WIDTH);
    for (int token = 0; token < TOKENS; token++)
      std::copy(x + token * k + i, x + token * k + k, last_x + token * WIDTH);
    add_products(last_w, last_x, WIDTH);
  }

  Sums total = add_lanes(sums);
  T rounded[LANES];
  for (int lane = 0; lane < LANES; lane++) rounded[lane] = total[lane];
  for (int token = 0; token < TOKENS; token++) std::copy_n(rounded + token * ROWS, ROWS, y + token * outputs);
}

// The first tile of the tokens asks for the weights of the next rows; the others find these in the cache.
template <int ROWS, class T>
void rows(const T* w, const T* x, int64_t tokens, int64_t k, int64_t outputs, T* y) {
  constexpr int TILE_ROWS = std::min(ROWS, LANES / 4);  // so that the sums of 4 tokens fit into the registers
  int64_t token = 0;
  for (; token + 4 <= tokens; token += 4)
    for (int row = 0; row < ROWS; row += TILE_ROWS) {
      auto* to = y + token * outputs + row;
      if (token == 0) tile<TILE_ROWS, 4, true>(w + row * k, x, k, outputs, to);
      else tile<TILE_ROWS, 4, false>(w + row * k, x + token * k, k, outputs, to);
    }
  for (; token < tokens; token++)
    if (token == 0) tile<ROWS, 1, true>(w, x, k, outputs, y);
    else tile<ROWS, 1, false>(w, x + token * k, k, outputs, y + token * outputs);
}

template <class T>
void multiply(const Tensor& x, const Tensor& w, Tensor& y) {
  int64_t outputs = w.size(0), k = w.size(1), tokens = x.numel() / k;
  const T *inputs = x.const_data_ptr<T>(), *weights = w.const_data_ptr<T>();
  T* to = y.mutable_data_ptr<T>();
  at::parallel_for(0, outputs, std::max<int64_t>(4, 32768 / k), [&](int64_t row, int64_t end) {
    for (; row + 4 <= end; row += 4) rows<4>(weights + row * k, inputs, tokens, k, outputs, to + row);
    for (; row < end; row++) rows<1>(weights + row * k, inputs, tokens, k, outputs, to + row);
  });
}

// x (..., k) and w (n, k), both fp32 or both bf16, contiguous -> (..., n), summed in fp32
Tensor matvec(const Tensor& x, const Tensor& w) {
  TORCH_CHECK(x.is_contiguous() && w.is_contiguous() && w.dim() == 2 && x.size(-1) == w.size(1));
  TORCH_CHECK(x.scalar_type() == w.scalar_type());
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  Tensor y = at::empty(shape, x.options());
  x.scalar_type() == at::kBFloat16 ? multiply<BFloat16>(x, w, y) : multiply<float>(x, w, y);
  return y;
}

TORCH_LIBRARY(attend, library) { library.def("matvec(Tensor x, Tensor w) -> Tensor"); }
TORCH_LIBRARY_IMPL(attend, CPU, library) { library.impl("matvec", matvec); }
