#include "trainer/cpu/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include <unistd.h>

#include <fmt/core.h>

#include "core/error.h"
#include "reference/optimizer.h"
#include "reference/mlp.h"
#include "trainer/cpu/ops.h"

namespace gdn::trainer {

namespace {

constexpr std::align_val_t kAlignment{256};

class CpuProvider final : public model::Provider {
public:
  std::string_view name() const override { return "cpu"; }
  model::Work work(const model::OpList& list, const model::Op& op, int step) const override {
    model::Work w;
    if (auto scratch = cpu::functions_of(op.kind).scratch) w.scratch = scratch(list, op, step);
    w.flops = op.model_flops * (step < 0 || op.steps.size() > 1 ? 1 : 2);
    return w;
  }
};

// A reason why an op of a kind that can run cannot run with these attributes.
std::string_view refusal(const model::Op& op) {
  const std::string_view kind = cpu::functions_of(op.kind).reason;
  if (!kind.empty()) return kind;
  if (!cpu::functions_of(op.kind).forward) return "no function is registered for it";
  if (op.kind == model::OpKind::CoreAttention && !op.collectives.empty() && op.collectives[0].kind != model::CollectiveKind::AllGather)
    return "attention over context-parallel ranks runs with cp_comm_type all_gather or a2a; rings are priced, not executed";
  if (const auto* a = std::get_if<model::GdnAttr>(&op.attr); a && a->deterministic)
    return "the plain-PyTorch form of deterministic mode is priced, not executed; every kernel here is deterministic";
  if (const auto* a = std::get_if<model::AttentionAttr>(&op.attr); a && !a->fused)
    return "unfused core attention is priced, not executed";
  if (op.kind == model::OpKind::ResidualAdd && op.outputs.size() > 1) return "dropout is priced, not executed";
  if (op.kind == model::OpKind::Embedding && op.outputs.size() > 1) return "dropout is priced, not executed";
  if (const auto* a = std::get_if<model::MoeAttr>(&op.attr); a && a->sigmoid)
    return "sigmoid routing with its selection bias is priced, not executed";
  return {};
}

} // namespace

const model::Provider& cpu_provider() {
  static const CpuProvider provider;
  return provider;
}

CpuDevice::CpuDevice() : memory_(static_cast<Bytes>(sysconf(_SC_PHYS_PAGES)) * static_cast<Bytes>(sysconf(_SC_PAGE_SIZE))) {}

const model::Provider& CpuDevice::provider() const { return cpu_provider(); }

std::byte* CpuDevice::allocate(Bytes bytes, std::string_view what) {
  ++allocations_;
  try {
    return static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlignment));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::DoesNotFit, fmt::format("out of host memory: {} for {}", format_bytes(bytes), what));
  }
}

void CpuDevice::deallocate(std::byte* data) { ::operator delete(data, kAlignment); }

void CpuDevice::fill(std::byte* data, Bytes bytes, unsigned char value) { std::memset(data, value, static_cast<size_t>(bytes)); }

bool CpuDevice::holds(const std::byte* data, Bytes bytes, unsigned char value) {
  return std::all_of(data, data + bytes, [&](std::byte b) { return b == std::byte{value}; });
}

kernels::Fingerprint CpuDevice::fingerprint(const float* data, std::int64_t n) {
  kernels::Fingerprint sum;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, data + i, sizeof word);
    sum.add(word, static_cast<std::uint64_t>(i));
  }
  return sum;
}

void CpuDevice::to_device(std::byte* to, const void* from, Bytes bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }
void CpuDevice::to_host(void* to, const std::byte* from, Bytes bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }

void CpuDevice::check_runs(const model::Op& op) const {
  if (std::string_view why = refusal(op); !why.empty())
    throw Error(ErrorCode::Config, fmt::format("op '{}' ({}) does not run on the cpu: {}", op.name, model::name_of(op.kind), why));
}

void CpuDevice::run(const OpCall& call) {
  const cpu::OpFunctions& f = cpu::functions_of(call.op().kind);
  (call.step() < 0 ? f.forward : f.backward)(call);
}

double CpuDevice::sum_of_squares(const float* gradient, std::int64_t n) {
  return reference::sum_of_squares({gradient, static_cast<size_t>(n)});
}

void CpuDevice::adamw(const AdamWUpdate& a, const float* gradient, float* master, float* m, float* v, std::int64_t n, View live) {
  const auto size = static_cast<size_t>(n);
  reference::adamw_step({a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.step, a.gradient_scale}, {gradient, size},
                        {master, size}, {m, size}, {v, size}, cpu::values(live));
}

void CpuDevice::convert(const float* from, View to) {
  const std::int64_t n = to.rows * to.cols;
  reference::convert(reference::ConstValues(from, DType::FP32, 1, n, n), reference::Values(to.data, to.dtype, 1, n, n));
}

} // namespace gdn::trainer
