#include "trainer/cuda/device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "core/error.h"
#include "kernels/common/check.h"
#include "kernels/common/elementwise.h"
#include "kernels/common/memory.h"
#include "kernels/common/reduce.h"
#include "kernels/describe/own.h"
#include "kernels/gemm/grouped_gemm.h"
#include "kernels/optimizer/adamw.h"
#include "trainer/cuda/gpus.h"
#include "trainer/cuda/ops.h"
#include "trainer/cuda/recording.h"

namespace gdn::trainer {

namespace {

// A reason why an op of a kind that can run cannot run with these attributes or parameters.
std::string refusal(const model::Op& op) {
  const kernels::OwnEntry& entry = kernels::own_entry(op.kind);
  if (!entry.work) return std::string(entry.reason);
  if (const auto* a = std::get_if<model::LinearAttr>(&op.attr); a && a->tp > 1 && a->mode == model::TensorParallel::Row && op.params.size() > 1)
    return "a bias behind the sum over tensor-parallel ranks is not executed";
  if (op.kind == model::OpKind::CoreAttention && !op.collectives.empty() && op.collectives[0].kind != model::CollectiveKind::AllGather)
    return "attention around a ring of context-parallel ranks is priced, not executed (cp_comm_type: all_gather or a2a)";
  for (const model::ParamRef& p : op.params) {
    const bool gate = p.name.ends_with("A_log") || p.name.ends_with("dt_bias") || p.name.ends_with("expert_bias");
    if (p.dtype != DType::BF16 && !gate) return fmt::format("'{}' is {}, and the kernels take bf16", p.name, name_of(p.dtype));
  }
  if (const auto* a = std::get_if<model::GdnAttr>(&op.attr)) {
    if (a->deterministic) return "the plain-PyTorch form of deterministic mode is priced, not executed; every kernel here is deterministic";
    if (!a->compiled) return "gates and norms that run op by op are priced, not executed";
    const bool convolves = op.kind == model::OpKind::GdnPre || op.kind == model::OpKind::Gdn2Pre || op.kind == model::OpKind::ConvSilu || op.kind == model::OpKind::Conv;
    if (op.kind == model::OpKind::Gdn2Rule && std::max(a->key_dim, a->value_dim) > 128) return "GDN2 runs with heads up to 128 wide";
    if (convolves && a->kernel != 4) return fmt::format("convolutions of {} taps: the kernels have 4", a->kernel);
  }
  if (const auto* a = std::get_if<model::AttentionAttr>(&op.attr); a && !a->fused) return "unfused core attention is priced, not executed";
  if ((op.kind == model::OpKind::ResidualAdd || op.kind == model::OpKind::Embedding) && op.outputs.size() > 1)
    return "dropout is priced, not executed";
  if (const auto* a = std::get_if<model::MoeAttr>(&op.attr)) {
    if (a->sigmoid) return "sigmoid routing with its selection bias is priced, not executed";
    if (a->experts > kernels::kMaxExperts) return fmt::format("{} experts: the kernels take up to {}", a->experts, kernels::kMaxExperts);
  }
  return {};
}

} // namespace

bool have_cuda_device(std::string* why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  std::string reason;
  if (status != cudaSuccess || count == 0) {
    reason = status == cudaSuccess ? "no GPU is visible" : cudaGetErrorString(status);
  } else {
    cudaDeviceProp p;
    GDN_CUDA(cudaGetDeviceProperties(&p, 0));
    if (p.major != 9 || p.minor != 0)
      reason = fmt::format("the kernels are for Hopper (compute capability 9.0), '{}' has {}.{}", p.name, p.major, p.minor);
  }
  if (why) *why = reason;
  return reason.empty();
}

struct CudaDevice::State {
  std::string name;
  Bytes memory = 0;
  cuda::Engine engine;
  cuda::Buffer fixed;  // totals, tables and partial sums
  cuda::StepData step;
  double* squares = nullptr; // [kSquareParts + 1]
  kernels::Fingerprint* compared = nullptr; // results of comparisons
  cudaEvent_t before = nullptr, after = nullptr;
};

namespace {

// This rank's GPU becomes the thread's: before anything is made that belongs to one.
int open_gpu() {
  const int gpu = cuda::gpu_of_rank();
  GDN_CUDA(cudaSetDevice(gpu));
  return gpu;
}

} // namespace

CudaDevice::CudaDevice() {
  const int gpu = open_gpu();
  state_ = std::make_unique<State>();
  State& s = *state_;
  cudaDeviceProp p;
  GDN_CUDA(cudaGetDeviceProperties(&p, gpu));
  s.name = p.name;
  s.engine.sm_count = p.multiProcessorCount;
  GDN_CUDA(cudaStreamCreateWithFlags(&s.engine.stream, cudaStreamNonBlocking));
  GDN_CUDA(cudaEventCreate(&s.before));
  GDN_CUDA(cudaEventCreate(&s.after));
  cuda::Parts parts;
  const Bytes sums = parts.add(cuda::DeviceTotals::kSums * 8), load = parts.add(kernels::kMaxExperts * 8),
              squares = parts.add((kernels::kSquareParts + 1) * 8), compared = parts.add(sizeof(kernels::Fingerprint)), tables = parts.add(cuda::Engine::kTables * cuda::Engine::kTableSize * 4);
  s.fixed.reserve(parts.end());
  std::byte* at = s.fixed.data();
  s.engine.totals = {reinterpret_cast<double*>(at + sums), reinterpret_cast<std::int64_t*>(at + load)};
  s.squares = reinterpret_cast<double*>(at + squares);
  s.compared = reinterpret_cast<kernels::Fingerprint*>(at + compared);
  s.engine.tables = reinterpret_cast<std::int32_t*>(at + tables);
  size_t free = 0, total = 0;
  GDN_CUDA(cudaMemGetInfo(&free, &total));
  s.memory = static_cast<Bytes>(free);
}

CudaDevice::~CudaDevice() {
  GDN_CUDA_NOTHROW(cudaEventDestroy(state_->before));
  GDN_CUDA_NOTHROW(cudaEventDestroy(state_->after));
  GDN_CUDA_NOTHROW(cudaStreamDestroy(state_->engine.stream));
}

std::string CudaDevice::name() const { return state_->name; }
const model::Provider& CudaDevice::provider() const { return kernels::own_provider(); }
Bytes CudaDevice::memory() const { return state_->memory; }
// 4096 FLOP a clock and multiprocessor; at 1.83 GHz the 989 TFLOP/s of the data sheets of H100 and H200.
FlopsPerSecond CudaDevice::peak() const { return state_->engine.sm_count * 4096 * 1.83e9; }

std::byte* CudaDevice::allocate(Bytes bytes, std::string_view what) {
  ++allocations_;
  return kernels::allocate(bytes, what);
}

void CudaDevice::deallocate(std::byte* data) {
  GDN_CUDA_NOTHROW(cudaStreamSynchronize(state_->engine.stream));
  GDN_CUDA_NOTHROW(cudaFree(data));
}

void CudaDevice::fill(std::byte* data, Bytes bytes, unsigned char value) {
  if (bytes > 0) GDN_CUDA(cudaMemsetAsync(data, value, static_cast<size_t>(bytes), state_->engine.stream));
}

bool CudaDevice::holds(const std::byte* data, Bytes bytes, unsigned char value) {
  if (bytes == 0) return true;
  kernels::find_other(data, bytes, value, reinterpret_cast<std::int32_t*>(state_->compared), state_->engine.launch());
  std::int32_t other = 0;
  to_host(&other, reinterpret_cast<const std::byte*>(state_->compared), sizeof other);
  return other == 0;
}

kernels::Fingerprint CudaDevice::fingerprint(const float* data, std::int64_t n) {
  kernels::fingerprint(data, n, state_->compared, state_->engine.launch());
  kernels::Fingerprint sum;
  to_host(&sum, reinterpret_cast<const std::byte*>(state_->compared), sizeof sum);
  return sum;
}

Device::MemoryNow CudaDevice::memory_now() {
  synchronise();
  size_t free = 0, total = 0;
  GDN_CUDA(cudaMemGetInfo(&free, &total));
  return {static_cast<Bytes>(total - free), static_cast<Bytes>(free)};
}

void CudaDevice::to_device(std::byte* to, const void* from, Bytes bytes) {
  GDN_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, state_->engine.stream));
  synchronise();
}

void CudaDevice::to_host(void* to, const std::byte* from, Bytes bytes) {
  GDN_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, state_->engine.stream));
  synchronise();
}

void CudaDevice::synchronise() { GDN_CUDA(cudaStreamSynchronize(state_->engine.stream)); }

std::unique_ptr<World> CudaDevice::connect(World& host) {
  if (host.size() == 1) return nullptr;
  return cuda::connect_gpus(host, state_->engine.stream, state_->engine.sm_count);
}

void CudaDevice::begin_step(const StepContext& context) {
  State& s = *state_;
  s.step.bring(context, s.engine);
  synchronise(); // exchanges on other streams find it too
  s.engine.batches = s.step.batches();
  fill(reinterpret_cast<std::byte*>(s.engine.totals.sums), cuda::DeviceTotals::kSums * 8, 0);
  fill(reinterpret_cast<std::byte*>(s.engine.totals.load), kernels::kMaxExperts * 8, 0);
  s.engine.experts_seen = 0;
}

void CudaDevice::end_step(const StepContext& context) {
  State& s = *state_;
  double sums[cuda::DeviceTotals::kSums] = {};
  to_host(sums, reinterpret_cast<const std::byte*>(s.engine.totals.sums), sizeof sums);
  if (context.totals == nullptr) return;
  StepTotals& t = *context.totals;
  t.loss_sum += sums[cuda::DeviceTotals::kLoss];
  t.mtp_sum += sums[cuda::DeviceTotals::kMtp];
  t.aux_loss += sums[cuda::DeviceTotals::kAux];
  if (s.engine.experts_seen == 0) return;
  std::vector<std::int64_t> load(static_cast<size_t>(s.engine.experts_seen));
  to_host(load.data(), reinterpret_cast<const std::byte*>(s.engine.totals.load), static_cast<Bytes>(load.size() * 8));
  t.expert_load.resize(std::max(t.expert_load.size(), load.size()));
  for (size_t i = 0; i < load.size(); ++i) t.expert_load[i] += load[i];
}

void CudaDevice::check_runs(const model::Op& op) const {
  if (const std::string why = refusal(op); !why.empty())
    throw Error(ErrorCode::Config, fmt::format("op '{}' ({}) does not run on cuda: {}", op.name, model::name_of(op.kind), why));
}

void CudaDevice::run(const OpCall& call) {
  const cuda::OpFunctions& f = cuda::functions_of(call.op().kind);
  (call.step() < 0 ? f.forward : f.backward)(call, state_->engine);
}

std::unique_ptr<Recording> CudaDevice::record(const StepContext& context, const std::function<void()>& pass) {
  return std::make_unique<cuda::GraphRecording>(context, pass, state_->engine);
}

Seconds CudaDevice::run_timed(const OpCall& call) {
  State& s = *state_;
  GDN_CUDA(cudaEventRecord(s.before, s.engine.stream));
  run(call);
  GDN_CUDA(cudaEventRecord(s.after, s.engine.stream));
  GDN_CUDA(cudaEventSynchronize(s.after));
  float ms = 0;
  GDN_CUDA(cudaEventElapsedTime(&ms, s.before, s.after));
  return static_cast<double>(ms) * 1e-3;
}

// Permute: first row of every expert, and the end. Router: slots of every expert.
void CudaDevice::fetch_host_table(const OpCall& call) {
  if (call.step() >= 0) return;
  std::vector<std::int64_t>& table = call.host_table(call.op_index());
  if (call.op().kind == model::OpKind::Permute) {
    std::vector<std::int32_t> offsets(static_cast<size_t>(call.attr<model::MoeAttr>().experts) + 1);
    to_host(offsets.data(), reinterpret_cast<const std::byte*>(state_->engine.table(call, call.op_index())), static_cast<Bytes>(offsets.size() * 4));
    table.assign(offsets.begin(), offsets.end());
  } else if (call.op().kind == model::OpKind::Router) {
    const View index = call.out(3);
    std::vector<std::int64_t> experts(static_cast<size_t>(index.rows * index.cols));
    to_host(experts.data(), index.data, static_cast<Bytes>(experts.size() * 8));
    table.assign(static_cast<size_t>(call.attr<model::MoeAttr>().experts), 0);
    for (std::int64_t e : experts) ++table[static_cast<size_t>(e)];
  }
}

double CudaDevice::sum_of_squares(const float* gradient, std::int64_t n) {
  State& s = *state_;
  kernels::LaunchContext context = s.engine.launch();
  context.scratch = s.squares + 1;
  context.scratch_bytes = kernels::kSquareParts * 8;
  kernels::sum_of_squares(gradient, n, s.squares, context);
  double sum = 0;
  to_host(&sum, reinterpret_cast<const std::byte*>(s.squares), 8);
  return sum;
}

void CudaDevice::adamw(const AdamWUpdate& a, const float* gradient, float* master, float* m, float* v, std::int64_t n, View live) {
  if (live && live.dtype != DType::BF16) throw Error(ErrorCode::Internal, "the update rounds parameters to bf16 only");
  kernels::AdamWParams p;
  p.n = n;
  p.gradient = gradient;
  p.master = master;
  p.m = m;
  p.v = v;
  p.live = live.data;
  p.lr = static_cast<float>(a.lr);
  p.beta1 = static_cast<float>(a.beta1);
  p.beta2 = static_cast<float>(a.beta2);
  p.eps = static_cast<float>(a.eps);
  p.weight_decay = static_cast<float>(a.weight_decay);
  p.gradient_scale = static_cast<float>(a.gradient_scale);
  p.correction1 = static_cast<float>(1 - std::pow(a.beta1, static_cast<double>(a.step)));
  p.correction2 = static_cast<float>(1 - std::pow(a.beta2, static_cast<double>(a.step)));
  kernels::adamw(p, state_->engine.launch());
}

void CudaDevice::convert(const float* from, View to) {
  const std::int64_t n = to.rows * to.cols;
  kernels::copy({const_cast<float*>(from), DType::FP32, 1, n, n}, {{to.data, to.dtype, 1, n, n}, false}, state_->engine.launch());
}

bool CudaDevice::fill_normal(float* to, std::int64_t n, double stddev, const reference::RandomStream& stream, std::int64_t first) {
  kernels::fill_normal(to, n, stddev, stream.seed, stream.where(), first, state_->engine.launch());
  return true;
}

} // namespace gdn::trainer
