#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/exact.h"
#include "trainer/op_check.h"

// The check of single ops against the same in double: what passes, and that one wrong number in one
// tensor of one op is found.
using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

namespace {

// A CPU device whose op `target` gets one element of its last written operand wrong.
class Spoiled final : public DecoratedDevice {
public:
  Spoiled(Device& inner, std::string target) : DecoratedDevice(inner), target_(std::move(target)) {}
  void run(const OpCall& call) override {
    inner_.run(call);
    if (call.name() != target_) return;
    for (const OpCall::Operand& o : call.operands()) {
      const View v = call.view_of(o);
      if (o.access.mode == program::AccessMode::Read || v.dtype != DType::FP32) continue;
      double squares = 0;
      auto* x = reinterpret_cast<float*>(v.data);
      for (std::int64_t i = 0; i < v.cols; ++i) squares += x[i] * x[i];
      x[0] += 0.5f * static_cast<float>(std::sqrt(squares)) + 1e-3f; // what a wrong index does
      return;
    }
  }

private:
  std::string target_;
};

std::vector<OpError> checked(const char* stack, DType dtype, Device& device, LayerKind mixer = LayerKind::Gdn) {
  const config::Model model = fixture::model({mixer, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense});
  config::Run run = fixture::run(2); // the second micro-batch accumulates
  run.stack = stack;
  run.dtype = dtype;
  OpCheck check(device);
  Session session(model, run, check);
  session.parameters().initialise(3);
  session.use({});
  session.run(fixture::batches(model, run));
  return check.results();
}

// A CPU device whose op `target` leaves tensor `name` as zeros, as a kernel does that never writes it.
class Silent final : public DecoratedDevice {
public:
  Silent(Device& inner, std::string target, std::string name) : DecoratedDevice(inner), target_(std::move(target)), name_(std::move(name)) {}
  void run(const OpCall& call) override {
    inner_.run(call);
    if (call.name() != target_) return;
    for (const OpCall::Operand& o : call.operands()) {
      const View v = call.view_of(o);
      if (o.access.mode == program::AccessMode::Read || (o.access.gradient ? "d:" : "") + call.list().tensor(o.access.tensor).name != name_) continue;
      for (std::int64_t r = 0; r < v.rows; ++r) std::memset(v.data + r * v.stride * size_of(v.dtype), 0, static_cast<size_t>(v.cols * size_of(v.dtype)));
    }
  }

private:
  std::string target_, name_;
};

// A CPU device that leaves something else than the chunk's inverse in a rule's tensor A, and does without it.
class KeepsOther final : public DecoratedDevice {
public:
  using DecoratedDevice::DecoratedDevice;
  bool rule_keeps_n() const override { return true; }
  void run(const OpCall& call) override {
    const bool rule = call.op().kind == model::OpKind::Rule;
    if (rule && call.step() >= 0) swap(call.out(2));
    inner_.run(call);
    if (rule) swap(call.out(2));
  }

private:
  // Turns every value into its negative, and back.
  static void swap(const View& v) {
    for (std::int64_t r = 0; r < v.rows; ++r)
      for (std::int64_t c = 0; c < v.cols; ++c) reinterpret_cast<float*>(v.data)[r * v.stride + c] *= -1;
  }
};

// Takes the gradient that `target` reads away, and asks for what is said then.
class WithoutGradient final : public DecoratedDevice {
public:
  WithoutGradient(Device& inner, std::string target) : DecoratedDevice(inner), target_(std::move(target)) {}
  void run(const OpCall& call) override {
    if (call.name() == target_) {
      std::vector<OpCall::Operand> operands = call.operands();
      std::erase_if(operands, [](const OpCall::Operand& o) { return o.access.gradient && o.access.mode == program::AccessMode::Read; });
      program::Event event;
      event.op = call.op_index();
      event.step = call.step();
      event.pass = call.pass();
      HostTables tables;
      const OpCall without(call.list(), event, std::move(operands), std::vector<OpCall::Parameter>(call.op().params.size()), {}, call.context(),
                           call.micro_batch(), tables);
      try {
        inner_.run(without);
      } catch (const Error& e) {
        said = e.what();
      }
    }
    inner_.run(call);
  }
  std::string said;

private:
  std::string target_;
};

} // namespace

TEST_CASE("op check: the CPU's own ops agree with themselves in double, in both dtypes and stacks") {
  for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2})
    for (const char* stack : {"native", "megatron"})
      for (DType dtype : {DType::BF16, DType::FP32}) {
        CpuDevice cpu;
        const auto results = checked(stack, dtype, cpu, mixer);
        CHECK(results.size() > 40);
        for (const OpError& e : results) {
          CAPTURE(stack);
          CAPTURE(name_of(dtype));
          CAPTURE(e.op);
          CAPTURE(e.tensor);
          CHECK(e.error <= e.allowed);
          CHECK(e.runs >= 1);
        }
      }
}

TEST_CASE("op check: one wrong number in any op is found, and nowhere else") {
  for (const char* target : {"rule", "rule.backward", "conv1d", "in_proj.dgrad", "core_attention.backward", "lm_head", "final_norm"}) {
    CAPTURE(target);
    CpuDevice cpu;
    Spoiled spoiled(cpu, target);
    size_t hits = 0;
    for (const OpError& e : checked("megatron", DType::FP32, spoiled)) {
      const bool mine = e.op.ends_with(std::string(": ") + target);
      hits += mine;
      CHECK(e.ok() == !mine);
    }
    CHECK(hits > 0);
  }
}

TEST_CASE("op check: a bf16 rule that leaves out one result is found") {
  for (const auto& [target, tensor] : {std::pair<const char*, const char*>{"rule", "o"}, {"rule.backward", "d:q"}, {"rule.backward", "d:k"},
                                       {"rule.backward", "d:v"}, {"rule.backward", "d:g"}, {"rule.backward", "d:beta"}}) {
    CAPTURE(tensor);
    CpuDevice cpu;
    Silent silent(cpu, target, tensor);
    size_t hits = 0;
    for (const OpError& e : checked("megatron", DType::BF16, silent)) hits += !e.ok() && e.op.ends_with(std::string(": ") + target) && e.tensor == tensor;
    CHECK(hits > 0);
  }
}

TEST_CASE("a step whose gradient nobody gives says so") {
  for (const auto& [target, gradient] : {std::pair<const char*, const char*>{"rule.backward", "d:o"}, {"gated_norm.backward", "d:gated"}, {"core_attention.backward", "d:"}}) {
    CAPTURE(target);
    CpuDevice cpu;
    WithoutGradient device(cpu, target);
    checked("megatron", DType::BF16, device);
    CHECK(device.said.find(std::string("nothing gives '") + gradient) != std::string::npos);
  }
}

TEST_CASE("op check: a rule whose tensor A is its own is judged against the exact inverse") {
  for (const char* stack : {"native", "megatron"}) {
    CpuDevice cpu;
    KeepsOther device(cpu);
    for (const OpError& e : checked(stack, DType::FP32, device)) {
      CAPTURE(e.op);
      CAPTURE(e.tensor);
      CHECK(e.error <= e.allowed);
    }
  }
}

TEST_CASE("exact values: beside an fp32 run, nearer to the limit than it, the same in both stacks") {
  const config::Model model = fixture::hybrid();
  std::vector<std::vector<double>> exact;
  for (const char* stack : {"native", "megatron"}) {
    config::Run run = fixture::run();
    run.stack = stack;
    run.dtype = DType::FP32;
    ExactDevice device;
    Session session(model, run, device);
    session.parameters().initialise(3);
    session.use({});
    session.run(fixture::batches(model, run));
    const ParameterSlot& slot = session.parameters().at("layers.0.gdn.in_proj");
    exact.push_back(device.values(slot.gradient, slot.elements));
    const std::vector<float> single = session.parameters().gradient("layers.0.gdn.in_proj");
    double off = 0, norm = 0;
    for (size_t i = 0; i < single.size(); ++i) {
      off += std::pow(single[i] - exact.back()[i], 2);
      norm += std::pow(exact.back()[i], 2);
    }
    CHECK(off > 0);
    CHECK(std::sqrt(off / norm) < 1e-4);
  }
  double off = 0, norm = 0;
  for (size_t i = 0; i < exact[0].size(); ++i) {
    off += std::pow(exact[0][i] - exact[1][i], 2);
    norm += std::pow(exact[0][i], 2);
  }
  CHECK(std::sqrt(off / norm) < 1e-12); // two lists of ops, one function
}
