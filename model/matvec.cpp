// A few tokens times a matrix, on a CPU: every weight is read once, in order, ahead of its use.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

using at::Tensor;

constexpr int LANES = 16, AHEAD = 4096;  // numbers of a vector; bytes that memory is asked for before they are needed
using Floats = float __attribute__((vector_size(4 * LANES)));
using Ints = int32_t __attribute__((vector_size(4 * LANES)));

inline Floats load(const float* from) {
  using Unaligned = float __attribute__((vector_size(4 * LANES), aligned(4)));
  return *reinterpret_cast<const Unaligned*>(from);
}

inline Floats load(const at::BFloat16* from) {  // the upper half of an fp32
  using Unaligned = uint16_t __attribute__((vector_size(2 * LANES), aligned(2)));
  return (Floats)(__builtin_convertvector(*reinterpret_cast<const Unaligned*>(from), Ints) << 16);
}

// ROWS rows of w (., k), at `w`, times TOKENS rows of x (., k): y[token * outputs + row]
template <int ROWS, int TOKENS, class W, class Y>
inline void tile(const W* w, const float* x, int64_t k, int64_t outputs, Y* y) {
  Floats sums[ROWS][TOKENS] = {};
  const char* ahead = reinterpret_cast<const char*>(w) + AHEAD;
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    for (size_t byte = 0; byte < ROWS * LANES * sizeof(W); byte += 64) __builtin_prefetch(ahead + byte);
    ahead += ROWS * LANES * sizeof(W);
    Floats weights[ROWS];
    for (int row = 0; row < ROWS; row++) weights[row] = load(w + row * k + i);
    for (int token = 0; token < TOKENS; token++) {
      Floats inputs = load(x + token * k + i);
      for (int row = 0; row < ROWS; row++) sums[row][token] += weights[row] * inputs;
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int token = 0; token < TOKENS; token++) {
      float sum = 0;
      for (int lane = 0; lane < LANES; lane++) sum += sums[row][token][lane];
      for (int64_t rest = i; rest < k; rest++) sum += float(w[row * k + rest]) * x[token * k + rest];
      y[token * outputs + row] = sum;
    }
}

template <int ROWS, class W, class Y>
inline void rows(const W* w, const float* x, int64_t tokens, int64_t k, int64_t outputs, Y* y) {
  int64_t token = 0;
  for (; token + 4 <= tokens; token += 4) tile<ROWS, 4>(w, x + token * k, k, outputs, y + token * outputs);
  for (; token < tokens; token++) tile<ROWS, 1>(w, x + token * k, k, outputs, y + token * outputs);
}

template <class W, class X>
void multiply(const Tensor& x, const Tensor& w, Tensor& y) {
  int64_t outputs = w.size(0), k = w.size(1), tokens = x.numel() / k;
  const X* given = x.const_data_ptr<X>();
  std::vector<float> exact(given, given + x.numel());
  const W* weights = w.const_data_ptr<W>();
  X* to = y.mutable_data_ptr<X>();
  at::parallel_for(0, outputs, std::max<int64_t>(4, 32768 / k), [&](int64_t row, int64_t end) {
    for (; row + 4 <= end; row += 4) rows<4>(weights + row * k, exact.data(), tokens, k, outputs, to + row);
    for (; row < end; row++) rows<1>(weights + row * k, exact.data(), tokens, k, outputs, to + row);
  });
}

// x (..., k) and w (n, k), each fp32 or bf16, contiguous -> (..., n), of the type of x, summed in fp32
Tensor matvec(const Tensor& x, const Tensor& w) {
  TORCH_CHECK(x.is_contiguous() && w.is_contiguous() && w.dim() == 2 && x.size(-1) == w.size(1));
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  Tensor y = at::empty(shape, x.options());
  bool narrow = w.scalar_type() == at::kBFloat16;
  if (x.scalar_type() == at::kBFloat16)
    narrow ? multiply<at::BFloat16, at::BFloat16>(x, w, y) : multiply<float, at::BFloat16>(x, w, y);
  else
    narrow ? multiply<at::BFloat16, float>(x, w, y) : multiply<float, float>(x, w, y);
  return y;
}

TORCH_LIBRARY(attend, library) { library.def("matvec(Tensor x, Tensor w) -> Tensor"); }
TORCH_LIBRARY_IMPL(attend, CPU, library) { library.impl("matvec", matvec); }
