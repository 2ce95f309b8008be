// A few tokens times a matrix, on a CPU: every weight is read once, in order, asked for ahead of its use.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using at::BFloat16;
using at::Tensor;

constexpr int LANES = 16, AHEAD = 16384;  // sums of a vector; bytes between what is asked for and what is used
using Sums = float __attribute__((vector_size(4 * LANES)));

inline Sums load(const float* from) {
  using Unaligned = float __attribute__((vector_size(4 * LANES), aligned(4)));
  return *reinterpret_cast<const Unaligned*>(from);
}

inline Sums add(Sums sums, Sums a, Sums b) { return sums + a * b; }

#ifdef __AVX512BF16__  // two products for each sum
inline __m512bh load(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline Sums add(Sums sums, __m512bh a, __m512bh b) { return (Sums)_mm512_dpbf16_ps((__m512)sums, a, b); }
#else  // the upper half of an fp32
inline Sums load(const BFloat16* from) {
  using Unaligned = uint16_t __attribute__((vector_size(2 * LANES), aligned(2)));
  using Ints = int32_t __attribute__((vector_size(4 * LANES)));
  return (Sums)(__builtin_convertvector(*reinterpret_cast<const Unaligned*>(from), Ints) << 16);
}
#endif

// ROWS rows of k weights times TOKENS rows of k inputs: y[token * outputs + row]
template <int ROWS, int TOKENS, class T>
inline void tile(const T* w, const T* x, int64_t k, int64_t outputs, T* y) {
  using Vector = decltype(load(w));
  constexpr int WIDTH = sizeof(Vector) == 4 * LANES && !std::is_same_v<Vector, Sums> ? 2 * LANES : LANES;
  Sums sums[ROWS][TOKENS] = {};
  const char* ahead = reinterpret_cast<const char*>(w) + AHEAD;
  int64_t i = 0;
  for (; i + WIDTH <= k; i += WIDTH) {
    for (size_t byte = 0; byte < ROWS * WIDTH * sizeof(T); byte += 64) __builtin_prefetch(ahead + byte);
    ahead += ROWS * WIDTH * sizeof(T);
    Vector weights[ROWS];
    for (int row = 0; row < ROWS; row++) weights[row] = load(w + row * k + i);
    for (int token = 0; token < TOKENS; token++) {
      Vector inputs = load(x + token * k + i);
      for (int row = 0; row < ROWS; row++) sums[row][token] = add(sums[row][token], weights[row], inputs);
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int token = 0; token < TOKENS; token++) {
      float sum = 0;
      for (int lane = 0; lane < LANES; lane++) sum += sums[row][token][lane];
      for (int64_t rest = i; rest < k; rest++) sum += float(w[row * k + rest]) * float(x[token * k + rest]);
      y[token * outputs + row] = sum;
    }
}

template <int ROWS, class T>
inline void rows(const T* w, const T* x, int64_t tokens, int64_t k, int64_t outputs, T* y) {
  int64_t token = 0;
  for (; token + 4 <= tokens; token += 4) tile<ROWS, 4>(w, x + token * k, k, outputs, y + token * outputs);
  for (; token < tokens; token++) tile<ROWS, 1>(w, x + token * k, k, outputs, y + token * outputs);
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
