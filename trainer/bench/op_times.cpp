#include "trainer/bench/op_times.h"

#include <algorithm>

#include <fmt/format.h>

#include "trainer/data.h"
#include "trainer/telemetry.h"

namespace gdn::trainer::bench {

namespace {

std::string shape_of(const model::OpList& list, const std::vector<model::TensorId>& tensors) {
  std::string text;
  for (model::TensorId t : tensors) text += fmt::format("{}[{}]", text.empty() ? "" : " ", fmt::join(list.tensors[static_cast<size_t>(t)].shape, ", "));
  return text;
}

std::string pass_of(const OpCall& call) {
  if (call.step() < 0) return "forward";
  const std::string& step = call.backward_step().name;
  return step == "dgrad" || step == "wgrad" ? step : "backward";
}

} // namespace

Observer OpTimes::observer() {
  ++steps_;
  Observer o;
  o.ran = [this](size_t, const OpCall& call, Seconds seconds) {
    const std::string pass = pass_of(call), shape = fmt::format("{} -> {}", shape_of(call.list(), call.op().inputs), shape_of(call.list(), call.op().outputs));
    auto [at, fresh] = samples_.try_emplace({call.op().kind, pass, shape});
    if (fresh) {
      std::string unit = call.list().name;
      std::replace(unit.begin(), unit.end(), '.', '+');
      OpTime& op = at->second.op;
      op.op = unit + "." + call.op().name;
      op.kind = call.op().kind;
      op.pass = pass;
      op.shape = shape;
      op.work = session_.workload().provider().work(call.list(), call.op(), call.step());
      op.communicates = !(call.step() < 0 ? call.op().collectives : call.backward_step().collectives).empty();
    }
    at->second.seconds.push_back(seconds);
  };
  return o;
}

std::vector<OpTime> OpTimes::results() const {
  std::vector<OpTime> out;
  for (const auto& [key, samples] : samples_) {
    OpTime op = samples.op;
    op.seconds = quantiles(samples.seconds).median;
    op.runs = static_cast<int>(samples.seconds.size()) / steps_;
    out.push_back(std::move(op));
  }
  std::stable_sort(out.begin(), out.end(), [](const OpTime& a, const OpTime& b) { return a.seconds * a.runs > b.seconds * b.runs; });
  return out;
}

ColdDevice::ColdDevice(Device& inner) : DecoratedDevice(inner) {
  if (inner.asynchronous()) cover_ = DeviceMemory(inner, kCover, "a buffer larger than the cache");
}

Seconds ColdDevice::run_timed(const OpCall& call) {
  if (cover_.data()) inner_.fill(cover_.data(), cover_.bytes(), 0);
  return inner_.run_timed(call);
}

std::vector<OpTime> time_ops(const Setup& setup, Device& device, Bytes budget, int steps) {
  ColdDevice cold(device);
  const config::Run& run = setup.profile.run;
  Session session(setup.profile.model, run, cold, budget);
  session.parameters().initialise(setup.train.seed);
  session.use(setup.setting, Checks{.poison = false, .equality = false});
  const auto tokens = open_tokens({.seed = setup.train.seed}, ".", setup.profile.model.vocab, run.seq, run.settings.packed);
  const std::vector<Batch> batches = step_batches(*tokens, run, 0);
  session.run(batches);
  OpTimes times(session);
  for (int i = 0; i < steps; ++i) session.run(batches, static_cast<std::uint64_t>(i + 1), setup.train.seed, times.observer());
  return times.results();
}

} // namespace gdn::trainer::bench
