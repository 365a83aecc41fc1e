#include "kernels/gemm/gemm.h"

#include <algorithm>

#include <cublasLt.h>
#include <fmt/core.h>

#include "core/error.h"

namespace gdn::kernels {

namespace {

void check_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorCode::Cuda, fmt::format("cuBLASLt: {} failed: {}", what, cublasLtGetStatusString(status)));
}
#define GDN_BLAS(call) check_blas((call), #call)

cudaDataType_t type_of(DType dtype) {
  if (dtype == DType::BF16) return CUDA_R_16BF;
  if (dtype == DType::FP32) return CUDA_R_32F;
  throw Error(ErrorCode::Internal, fmt::format("no matrix product in {}", name_of(dtype)));
}

// 16, 8, 4 or 2: what address and rows are multiples of.
int alignment(const Matrix& m) {
  if (m.data == nullptr) return 16;
  const auto bits = reinterpret_cast<std::uintptr_t>(m.data) | static_cast<std::uintptr_t>(m.stride * size_of(m.dtype));
  for (int a : {16, 8, 4})
    if (bits % static_cast<unsigned>(a) == 0) return a;
  return 2;
}

cublasLtMatrixLayout_t layout(const Matrix& m) { // rows as they lie are columns of cuBLAS
  cublasLtMatrixLayout_t l;
  GDN_BLAS(cublasLtMatrixLayoutCreate(&l, type_of(m.dtype), static_cast<std::uint64_t>(m.cols), static_cast<std::uint64_t>(m.rows),
                                      std::max(m.stride, m.cols)));
  return l;
}

} // namespace

struct Gemm::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
  ~Plan() {
    cublasLtMatrixLayoutDestroy(d);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatmulDescDestroy(operation);
  }
};

Gemm::Gemm() { GDN_BLAS(cublasLtCreate(reinterpret_cast<cublasLtHandle_t*>(&handle_))); }
Gemm::~Gemm() {
  plans_.clear();
  cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

// Row-major d = op(a) op(b) is column-major d^T = op(b)^T op(a)^T: the operands trade places.
Gemm::Plan& Gemm::plan(const GemmParams& p, std::int64_t k) {
  const int forms = p.transpose_a | p.transpose_b << 1 | p.accumulate << 2 | (p.bias.data != nullptr) << 3 |
                    (p.a.dtype == DType::FP32) << 4 | (p.d.dtype == DType::FP32) << 5;
  const int aligned = alignment(p.a) | alignment(p.b) << 8 | alignment(p.d) << 16;
  const Key key{p.d.rows, p.d.cols, k, p.a.stride, p.b.stride, p.d.stride, forms, aligned};
  std::unique_ptr<Plan>& plan = plans_[key];
  if (plan) return *plan;

  auto made = std::make_unique<Plan>();
  GDN_BLAS(cublasLtMatmulDescCreate(&made->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    GDN_BLAS(cublasLtMatmulDescSetAttribute(made->operation, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.bias.data) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(type_of(p.bias.dtype)));
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, const_cast<const void*>(p.bias.data));
  }
  made->a = layout(p.b);
  made->b = layout(p.a);
  made->d = layout(p.d);

  cublasLtMatmulPreference_t preference;
  GDN_BLAS(cublasLtMatmulPreferenceCreate(&preference));
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    GDN_BLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kGemmWorkspace));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(alignment(p.b)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(alignment(p.a)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(alignment(p.d)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(alignment(p.d)));
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(static_cast<cublasLtHandle_t>(handle_), made->operation, made->a, made->b,
                                                               made->d, made->d, preference, 1, &found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || count == 0)
    throw Error(ErrorCode::Cuda, fmt::format("cuBLASLt has no algorithm for [{} x {}] = [{} x {}] [{} x {}], {} to {}: {}", p.d.rows, p.d.cols,
                                             p.d.rows, k, k, p.d.cols, name_of(p.a.dtype), name_of(p.d.dtype), cublasLtGetStatusString(status)));
  made->algorithm = found.algo;
  plan = std::move(made);
  return *plan;
}

void Gemm::run(const GemmParams& p, const LaunchContext& context) {
  const std::int64_t k = p.transpose_a ? p.a.rows : p.a.cols;
  if (p.d.rows != (p.transpose_a ? p.a.cols : p.a.rows) || p.d.cols != (p.transpose_b ? p.b.rows : p.b.cols) ||
      k != (p.transpose_b ? p.b.cols : p.b.rows) || p.a.dtype != p.b.dtype)
    throw Error(ErrorCode::Internal, fmt::format("product of [{} x {}] and [{} x {}] into [{} x {}]", p.a.rows, p.a.cols, p.b.rows, p.b.cols,
                                                 p.d.rows, p.d.cols));
  if (context.scratch_bytes < kGemmWorkspace)
    throw Error(ErrorCode::Internal, fmt::format("gemm: {} bytes of scratch given, {} needed", context.scratch_bytes, kGemmWorkspace));
  if (p.d.rows == 0 || p.d.cols == 0) return;
  Plan& made = plan(p, k);
  if (p.bias.data) {
    const void* bias = p.bias.data;
    GDN_BLAS(cublasLtMatmulDescSetAttribute(made.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
  }
  const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
  GDN_BLAS(cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), made.operation, &one, p.b.data, made.a, p.a.data, made.b, &beta, p.d.data,
                          made.d, p.d.data, made.d, &made.algorithm, context.scratch, static_cast<std::size_t>(kGemmWorkspace),
                          context.stream));
}

} // namespace gdn::kernels
