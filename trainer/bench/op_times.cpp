#include "trainer/bench/op_times.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "model/static_state.h"
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

namespace {

// One rank's whole update, from zeroed gradients on.
OpTime time_update(Session& session, int times) {
  Device& device = session.device();
  Parameters& parameters = session.parameters();
  std::vector<double> seconds;
  for (int i = 0; i <= times; ++i) {
    device.synchronise();
    const auto start = std::chrono::steady_clock::now();
    parameters.zero_gradients();
    parameters.update({.lr = 1e-6, .step = i + 1});
    device.synchronise();
    if (i > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const CategoryBytes& held = parameters.bytes();
  const model::StateBytes state{held[Category::Parameters], held[Category::Gradients], held[Category::Optimizer]};
  OpTime op;
  op.op = "optimizer.update";
  op.pass = "any";
  op.shape = fmt::format("{} parameter bytes", state.parameters);
  op.work.family = model::Family::Optimizer;
  op.work.traffic = device.provider().update_traffic(state, 1, 1);
  op.work.size = static_cast<double>(op.work.traffic);
  op.work.kernels = 0;
  op.seconds = quantiles(seconds).median;
  op.runs = 1;
  return op;
}

} // namespace

std::vector<OpTime> time_ops(const Setup& setup, Device& device, Bytes budget, int steps) {
  ColdDevice cold(device);
  const config::Run& run = setup.profile.run;
  Session session(setup.profile.model, run, cold, budget);
  session.parameters().initialise(setup.train.seed);
  session.use(setup.setting, Checks{.poison = false, .equality = false});
  const auto tokens = open_tokens({.seed = setup.train.seed}, ".", setup.profile.model.vocab, run);
  const std::vector<Batch> batches = step_batches(*tokens, run, 0);
  session.run(batches);
  OpTimes times(session);
  for (int i = 0; i < steps; ++i) session.run(batches, static_cast<std::uint64_t>(i + 1), setup.train.seed, times.observer());
  std::vector<OpTime> all = times.results();
  all.push_back(time_update(session, std::min(steps, 5)));
  return all;
}

} // namespace gdn::trainer::bench
