#include "trainer/bench/body.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include <fmt/core.h>

#include "core/error.h"
#include "reference/random.h"

namespace gdn::trainer::bench {

namespace {

using Clock = std::chrono::steady_clock;

double to_double(const std::byte* at, DType dtype) {
  if (dtype == DType::FP32) {
    float value = 0;
    std::memcpy(&value, at, 4);
    return static_cast<double>(value);
  }
  std::uint16_t half = 0;
  std::memcpy(&half, at, 2);
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16; // bf16 is the upper half of an fp32
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return static_cast<double>(value);
}

void from_double(double value, std::byte* at, DType dtype) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::FP32) {
    std::memcpy(at, &single, 4);
    return;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, &single, 4);
  bits += 0x7fff + ((bits >> 16) & 1); // to the nearest, ties to even; the values are finite
  const auto half = static_cast<std::uint16_t>(bits >> 16);
  std::memcpy(at, &half, 2);
}

// Both neighbours of the stage, on the host.
class Neighbours {
public:
  Neighbours(Device& device, DType dtype) : device_(device), dtype_(dtype) {}

  void give(int tag, std::byte* data, Bytes bytes) {
    const Pause pause(*this);
    if (tag % 2 == 1) { // a gradient
      device_.to_device(data, gradient_.data(), bytes);
      return;
    }
    if (input_.empty()) {
      input_.resize(static_cast<size_t>(bytes));
      const reference::RandomStream random{.seed = 1};
      for (Bytes i = 0; i < bytes / size_of(dtype_); ++i) from_double(random.normal(static_cast<std::uint64_t>(i)), &input_[static_cast<size_t>(i * size_of(dtype_))], dtype_);
    }
    device_.to_device(data, input_.data(), bytes);
  }
  void take(int tag, const std::byte* data, Bytes bytes) {
    if (tag % 2 == 1) return;
    const Pause pause(*this);
    gradient_.resize(static_cast<size_t>(bytes));
    device_.to_host(gradient_.data(), data, bytes);
    const Bytes elements = bytes / size_of(dtype_);
    double sum = 0;
    for (Bytes i = 0; i < elements; ++i) {
      std::byte* const at = &gradient_[static_cast<size_t>(i * size_of(dtype_))];
      const double h = to_double(at, dtype_);
      sum += h * h;
      from_double(2 * h / static_cast<double>(elements), at, dtype_);
    }
    loss_ = sum / static_cast<double>(elements);
  }
  Seconds paused() { return std::exchange(paused_, 0); }
  double loss() const { return loss_; }

private:
  // The stage's work is done before the clock stops.
  struct Pause {
    explicit Pause(Neighbours& owner) : owner_(owner) {
      owner_.device_.synchronise();
      start_ = Clock::now();
    }
    ~Pause() { owner_.paused_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
    Neighbours& owner_;
    Clock::time_point start_;
  };

  Device& device_;
  DType dtype_;
  std::vector<std::byte> input_, gradient_;
  Seconds paused_ = 0;
  double loss_ = 0;
};

// The stage's side of its pipeline group. Nothing else is exchanged: all other groups have one rank.
class Pipeline final : public Communicator {
public:
  Pipeline(Neighbours& neighbours, int rank, int size) : neighbours_(neighbours), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_reduce(std::byte*, std::int64_t, DType, Reduction) override {}
  void all_gather(const std::byte*, std::byte*, Bytes) override { unexpected("all_gather"); }
  void reduce_scatter(const std::byte*, std::byte*, std::int64_t, DType) override { unexpected("reduce_scatter"); }
  void all_to_all(std::span<const Part>, std::span<const Part>) override { unexpected("all_to_all"); }
  void send(int, int tag, const std::byte* data, Bytes bytes) override { neighbours_.take(tag, data, bytes); }
  void receive(int, int tag, std::byte* data, Bytes bytes) override { neighbours_.give(tag, data, bytes); }
  void barrier() override {}
  void sum_on_host(std::span<double>) override {}

private:
  [[noreturn]] static void unexpected(const char* what) {
    throw Error(ErrorCode::Internal, fmt::format("the middle of a pipeline called {}", what));
  }
  Neighbours& neighbours_;
  int rank_, size_;
};

class PipelineWorld final : public World {
public:
  explicit PipelineWorld(Neighbours& neighbours) : neighbours_(neighbours) {}
  int rank() const override { return 1; }
  int size() const override { return 3; }
  std::unique_ptr<Communicator> group(const std::vector<int>& members) override {
    if (members.size() == 1) return Alone().group({0});
    const auto rank = static_cast<int>(std::find(members.begin(), members.end(), 1) - members.begin());
    return std::make_unique<Pipeline>(neighbours_, rank, static_cast<int>(members.size()));
  }
  void abort(int) override {}

private:
  Neighbours& neighbours_;
};

} // namespace

BodyTimes bench_body(const config::Model& model, config::Run run, const plan::Setting& setting, Device& device, Bytes budget, int steps) {
  if (run.parallel.gpus != 1)
    throw Error(ErrorCode::Config, fmt::format("gpus: the body is timed on one rank, the run is for {}", run.parallel.gpus), "--set gpus=1, and all parallel sizes 1");
  run.global_batch = run.micro_batch;
  run.parallel.gpus = run.parallel.pp = 3;
  run.parallel.vp = 1;
  run.parallel.layout = {0, model.layers(), 0};
  Neighbours neighbours(device, run.dtype);
  PipelineWorld world(neighbours);
  const Ranks ranks(world, run.parallel);
  Session session(model, run, device, budget, nullptr, &ranks);
  session.parameters().initialise(1);
  session.use(setting, Checks{.poison = false, .equality = false});
  Batch batch;
  batch.ids.assign(static_cast<size_t>(run.micro_batch * run.seq), 0);
  batch.labels.assign(batch.ids.size(), 0);
  batch.sequences = dense_sequences(run.micro_batch, run.seq);
  BodyTimes out;
  out.tokens = run.micro_batch * run.seq;
  const Bytes state = session.ledger().total();
  for (int step = -2; step < steps; ++step) { // two to warm up
    const StepResult r = session.run({batch});
    const Seconds seconds = r.seconds - neighbours.paused();
    if (step < 0) continue;
    out.seconds.push_back(seconds);
    out.activations = r.peak.bytes - state;
  }
  out.arena = session.arena_bytes();
  out.loss = neighbours.loss();
  return out;
}

} // namespace gdn::trainer::bench
