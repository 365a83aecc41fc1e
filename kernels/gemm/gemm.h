#pragma once
#include <map>
#include <memory>
#include <tuple>

#include "kernels/common/matrix.h"

namespace gdn::kernels {

// d (+)= op(a) op(b) + bias, accumulated in fp32. a and b have one dtype (bf16 or fp32), d that one or
// fp32. op transposes where asked: op(a) is [d.rows, k], op(b) [k, d.cols].
struct GemmParams {
  Matrix a, b;
  bool transpose_a = false, transpose_b = false;
  Matrix d;
  bool accumulate = false;
  Matrix bias = {}; // [1, d.cols] in a's dtype, absent: none
};

// What cuBLAS recommends for Hopper; the launch context's scratch.
inline constexpr std::int64_t kGemmWorkspace = std::int64_t{32} << 20;

// cuBLASLt with one algorithm per shape, asked for once, and never one that splits the contraction
// over CTAs: the same bits in every run.
class Gemm {
public:
  Gemm();
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // Throws Error{Cuda} naming the shape that no algorithm takes.
  void run(const GemmParams& params, const LaunchContext& context);
  std::size_t shapes() const { return plans_.size(); }

private:
  struct Plan;
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, int, int>;
  Plan& plan(const GemmParams& params, std::int64_t k);

  void* handle_ = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

} // namespace gdn::kernels
