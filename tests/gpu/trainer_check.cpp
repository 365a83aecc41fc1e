// The cuda device under the executor: its memory functions; every op and backward step of both stacks against the same in
// double, poisoned buffers and guard bands; repeated runs and every module set bit by bit; every way to normalise q and k
// through whole layers. Ends with 77 (SKIP) without a device.
//   trainer_check [memory|ops|bits|layers] [name of a case]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>

#include <fmt/core.h>

#include "core/error.h"
#include "plan/plan.h"
#include "reference/bf16.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/cuda/device.h"
#include "trainer/op_check.h"

using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

namespace {

// One row of documents of awkward lengths, as many as it may have, in place of two equal sequences.
constexpr std::int64_t kDocuments[] = {1, 66, 64, 100, 10, 1}; // and then one token each
constexpr std::int64_t kMostDocuments = 64;
void pack(config::Run& r) {
  r.settings.packed = true;
  r.micro_batch = r.global_batch = 1;
  r.seq = 300;
}
std::vector<Batch> batches_of(const config::Model& m, const config::Run& r) {
  std::vector<Batch> batches = fixture::batches(m, r);
  if (r.settings.packed)
    for (Batch& b : batches) {
      b.sequences = {0};
      for (std::int64_t length : kDocuments) b.sequences.push_back(b.sequences.back() + length);
      while (static_cast<std::int64_t>(b.sequences.size()) <= kMostDocuments) b.sequences.push_back(b.sequences.back() + 1);
    }
  return batches;
}

struct Case {
  const char* name;
  const char* stack;
  void (*change)(config::Model&, config::Run&);
};

const Case kCases[] = {
    {"native", "native", [](config::Model&, config::Run&) {}},
    {"native, no q/k norm, double beta, biases", "native", [](config::Model& m, config::Run&) {
       m.gdn.use_qk_l2norm = false;
       m.gdn.negative_eigenvalues = true;
       m.gdn.bias = m.gdn.conv_bias = m.attention.qkv_bias = true;
     }},
    {"native, whole-vector norm, MTP, fused loss", "native", [](config::Model& m, config::Run& r) {
       m.attention.kv_heads = 4;
       m.attention.whole_vector_qk_norm = true;
       m.mtp_layers = 1;
       r.cross_entropy = config::CrossEntropy::FusedTe;
     }},
    {"native, all experts scored, z-loss, logits kept", "native", [](config::Model& m, config::Run& r) {
       m.moe.renormalise = false;
       m.moe.z_loss_coeff = 1e-3;
       r.cross_entropy = config::CrossEntropy::FusedNative;
     }},
    {"native, wide heads", "native", [](config::Model& m, config::Run&) {
       m.gdn.key_head_dim = m.gdn.value_head_dim = 128;
       m.attention.head_dim = 256;
       m.attention.heads = 6;
     }},
    {"native, heads of 32", "native", [](config::Model& m, config::Run&) {
       m.gdn.key_head_dim = m.gdn.value_head_dim = m.attention.head_dim = 32;
       m.moe.ffn = m.moe.shared_ffn = 64;
     }},
    {"native, packed documents, wide heads", "native", [](config::Model& m, config::Run& r) {
       pack(r);
       m.gdn.key_head_dim = m.gdn.value_head_dim = 128;
       m.attention.head_dim = 256;
     }},
    {"megatron, packed documents", "megatron", [](config::Model&, config::Run& r) { pack(r); }},
    {"native, gdn2", "native", [](config::Model& m, config::Run&) { m.mixers = {LayerKind::Gdn2, LayerKind::Gdn2}; }},
    {"megatron", "megatron", [](config::Model&, config::Run&) {}},
    {"megatron, gdn2", "megatron", [](config::Model& m, config::Run&) { m.mixers = {LayerKind::Gdn2, LayerKind::Gdn2}; }},
    {"megatron, local", "megatron", [](config::Model&, config::Run& r) { r.build = config::Build::Local; }},
    {"megatron, normalisation in the kernel", "megatron", [](config::Model&, config::Run& r) {
       r.revision = Revision::parse("main+gdn_qkv+l2norm_kernel");
       r.l2norm = config::L2Norm::Kernel;
     }},
    {"megatron, tied embeddings, MTP", "megatron", [](config::Model& m, config::Run&) {
       m.tied_embeddings = true;
       m.mtp_layers = 2;
     }},
    {"megatron, unfused permutation, all experts scored", "megatron", [](config::Model& m, config::Run& r) {
       r.moe_permute_fusion = false;
       m.moe.renormalise = false;
       m.moe.z_loss_coeff = 1e-3;
     }},
    {"megatron, bf16 router, no shared gate, chunked loss", "megatron", [](config::Model& m, config::Run& r) {
       m.moe.router_dtype = DType::BF16;
       m.moe.shared_gate = false;
       r.cross_entropy = config::CrossEntropy::ChunkedLinear;
       r.loss_chunk = 50;
     }},
    {"megatron, no output gate, no q/k norm, no rotation, fused loss", "megatron", [](config::Model& m, config::Run& r) {
       m.attention.output_gate = m.attention.qk_norm = m.attention.rope = false;
       r.cross_entropy = config::CrossEntropy::FusedTe;
     }},
};

struct Shape {
  config::Model model;
  config::Run run;
};
Shape shape_of(const Case& c) {
  config::Model m = fixture::model({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense});
  m.hidden = 64;
  m.moe.experts = 8;
  m.moe.aux_loss_coeff = 1e-2;
  config::Run r = fixture::run();
  r.stack = c.stack;
  r.seq = 150; // three chunks of 64, the last with a tail
  r.micro_batch = 2;
  r.global_batch = 2;
  c.change(m, r);
  return {m, r};
}

int failures = 0;

void check_ops(const Case& c, CudaDevice& device) {
  const Shape s = shape_of(c);
  OpCheck checked(device);
  Session session(s.model, s.run, checked);
  session.parameters().initialise(3);
  session.use({}, Checks{.poison = true});
  session.run(batches_of(s.model, s.run));
  size_t ops = 0, wrong = 0;
  double worst = 0;
  for (const OpError& e : checked.results()) {
    ++ops;
    worst = std::max(worst, e.ok() ? e.error / e.allowed : 0);
    if (e.ok()) continue;
    ++wrong;
    std::printf("  WRONG %-40s %-24s off by %.1e, allowed %.1e (CPU %.1e)\n", e.op.c_str(), e.tensor.c_str(), e.error, e.allowed, e.reference);
  }
  std::printf("%-70s %3zu ops, %zu wrong, the others up to %.2f of the allowed error\n", c.name, ops, wrong, worst);
  failures += wrong > 0;
}

void check_bits(const Case& c, CudaDevice& device) {
  const Shape s = shape_of(c);
  Session session(s.model, s.run, device);
  session.parameters().initialise(3);
  const auto batches = batches_of(s.model, s.run);
  auto settings = plan::legal_settings(session.workload(), false);
  const size_t every = std::max<size_t>(1, settings.size() / 12);
  size_t ran = 0, different = 0;
  fixture::Outcome base;
  for (size_t i = 0; i < settings.size() + 1; ++i) { // the first one twice: two runs of one program
    if (i > 1 && i % every != 0 && i != settings.size()) continue;
    const plan::Setting setting = i < 2 ? plan::Setting{} : settings[i - 1];
    session.use(setting);
    const fixture::Outcome o = fixture::outcome(session, batches);
    if (ran++ == 0) {
      base = o;
      if (!std::isfinite(base.result.loss)) ++different;
      continue;
    }
    bool equal = o.result.loss == base.result.loss && o.result.aux_loss == base.result.aux_loss && o.result.expert_load == base.result.expert_load;
    for (size_t g = 0; g < base.gradients.size(); ++g)
      if (std::memcmp(o.gradients[g].data(), base.gradients[g].data(), o.gradients[g].size() * sizeof(float)) != 0) {
        if (equal) std::printf("  DIFFERS %s: %s\n", setting.text().c_str(), session.parameters().slots()[g].name().c_str());
        equal = false;
      }
    different += !equal;
  }
  std::printf("%-70s %zu runs, %zu with other bits, loss %.4f\n", c.name, ran, different, base.result.loss);
  failures += different > 0;
}

// The device's fingerprint is the CPU's, and its look at memory finds one byte anywhere.
void check_memory(CudaDevice& device) {
  const reference::RandomStream random{.seed = 5};
  CpuDevice cpu;
  size_t wrong = 0;
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{33}, std::int64_t{255}, std::int64_t{1'000'003}, std::int64_t{50'000'000}}) {
    std::vector<float> x(static_cast<size_t>(n));
    for (std::int64_t i = 0; i < std::min<std::int64_t>(n, 1'000'003); ++i) x[static_cast<size_t>(i)] = static_cast<float>(random.normal(static_cast<std::uint64_t>(i)));
    const DeviceMemory memory(device, n * 4, "a test");
    const auto* data = reinterpret_cast<const float*>(memory.data());
    device.to_device(memory.data(), x.data(), n * 4);
    const kernels::Fingerprint whole = cpu.fingerprint(x.data(), n);
    wrong += device.fingerprint(data, n) != whole;
    x.back() = std::nextafter(x.back(), 1e30f);
    device.to_device(memory.data(), x.data(), n * 4);
    wrong += device.fingerprint(data, n) == whole;
    for (const std::int64_t at : {std::int64_t{-1}, std::int64_t{0}, n * 2, n * 4 - 1}) { // one byte other than the rest; -1: none
      device.fill(memory.data(), n * 4, 0xa5);
      if (at >= 0) device.fill(memory.data() + at, 1, 0xa4);
      wrong += device.holds(memory.data(), n * 4, 0xa5) != (at < 0);
    }
  }
  std::printf("%-70s %zu wrong\n", "fingerprints and poison", wrong);
  failures += wrong > 0;
}

// Loss, what enters and leaves the layer, and every gradient of one step. Tokens differ, so the rows of the embedding's
// gradient are those of the layer's input.
struct LayerResults {
  std::vector<std::pair<std::string, std::vector<float>>> tensors;
};
LayerResults layer_results(const config::Model& m, config::Run run, DType dtype, Device& device) {
  run.dtype = dtype;
  Session session(m, run, device);
  session.parameters().initialise(3);
  for (const ParameterSlot& slot : session.parameters().slots()) { // the same weights in every dtype: what bf16 holds
    std::vector<float> w = session.parameters().weights(slot.name());
    for (float& x : w) x = static_cast<float>(reference::round_to_bf16(static_cast<double>(x)));
    session.parameters().set_weights(slot.name(), w);
  }
  session.use({});
  Batch batch = fixture::batches(m, run).front();
  for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<std::int64_t>(i);
  Trace trace = run_traced(session, batch);
  LayerResults r;
  r.tensors.push_back({"output", std::move(trace.hidden.back())});
  for (const ParameterSlot& slot : session.parameters().slots()) r.tensors.push_back({"d:" + slot.name(), session.parameters().gradient(slot.name())});
  return r;
}

double off_by(const std::vector<float>& x, const std::vector<float>& exact) {
  double off = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    off += std::pow(static_cast<double>(x[i]) - static_cast<double>(exact[i]), 2);
    norm += std::pow(static_cast<double>(exact[i]), 2);
  }
  return off == 0 ? 0 : std::sqrt(off / norm);
}

// A whole GDN layer in bf16: at most twice as far from fp32 arithmetic as the CPU's bf16 is, tensor by tensor.
void check_layers(CudaDevice& device) {
  struct Route {
    const char *name, *stack;
    LayerKind mixer;
    config::L2Norm norm;
  };
  const Route routes[] = {{"gdn, megatron, L2 norm by the caller", "megatron", LayerKind::Gdn, config::L2Norm::Caller},
                          {"gdn, megatron, L2 norm in the kernel", "megatron", LayerKind::Gdn, config::L2Norm::Kernel},
                          {"gdn, native", "native", LayerKind::Gdn, config::L2Norm::Caller},
                          {"gdn2, megatron", "megatron", LayerKind::Gdn2, config::L2Norm::Caller},
                          {"gdn2, native", "native", LayerKind::Gdn2, config::L2Norm::Caller}};
  for (const Route& route : routes)
    for (const std::int64_t dim : {64, 128}) {
      config::Model m = fixture::model({route.mixer}, {MlpKind::Dense});
      m.hidden = 128;
      m.vocab = 512;
      m.gdn.key_head_dim = m.gdn.value_head_dim = dim;
      config::Run r = fixture::run();
      r.stack = route.stack;
      r.seq = 300;
      if (route.norm == config::L2Norm::Kernel) r.revision = Revision::parse("main+gdn_qkv+l2norm_kernel");
      r.l2norm = route.norm;
      CpuDevice cpu;
      const LayerResults exact = layer_results(m, r, DType::FP32, cpu), plain = layer_results(m, r, DType::BF16, cpu), got = layer_results(m, r, DType::BF16, device);
      size_t wrong = 0;
      double worst = 0;
      for (size_t i = 0; i < exact.tensors.size(); ++i) {
        const double allowed = 2 * std::max(off_by(plain.tensors[i].second, exact.tensors[i].second), 0x1p-9);
        const double off = off_by(got.tensors[i].second, exact.tensors[i].second);
        worst = std::max(worst, off / allowed);
        if (off <= allowed) continue;
        ++wrong;
        std::printf("  WRONG %-40s off by %.1e, allowed %.1e\n", exact.tensors[i].first.c_str(), off, allowed);
      }
      std::printf("%-55s heads of %3d: %2zu tensors, %zu wrong, at most %.2f of the allowed error\n", route.name, static_cast<int>(dim), exact.tensors.size(), wrong, worst);
      failures += wrong > 0;
    }
}

} // namespace

int main(int argc, char** argv) {
  std::string why;
  if (!have_cuda_device(&why)) {
    std::printf("no CUDA device: %s\n", why.c_str());
    return 77;
  }
  const std::string what = argc > 1 ? argv[1] : "all", only = argc > 2 ? argv[2] : "";
  CudaDevice device;
  for (auto [name, check] : {std::pair<const char*, void (*)(CudaDevice&)>{"memory", check_memory}, {"layers", check_layers}})
    if (only.empty() && (what == "all" || what == name)) {
      std::printf("-- %s\n", name);
      check(device);
      std::fflush(stdout);
    }
  using Check = void (*)(const Case&, CudaDevice&);
  for (auto [name, check] : {std::pair<const char*, Check>{"ops", check_ops}, {"bits", check_bits}}) {
    if (what != "all" && what != name) continue;
    std::printf("-- %s\n", name);
    for (const Case& c : kCases) {
      if (!only.empty() && only != c.name) continue;
      try {
        check(c, device);
      } catch (const Error& e) {
        std::printf("%-70s FAILED: %s\n", c.name, e.what());
        ++failures;
        if (e.code() == ErrorCode::Cuda) return 1; // the context is lost
      }
      std::fflush(stdout);
    }
  }
  std::printf(failures == 0 ? "all checks passed\n" : "%d checks FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}
