#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include <doctest/doctest.h>
#include <fmt/core.h>
#include <unistd.h>

#include "core/error.h"
#include "fixture.h"
#include "trainer/decorated_device.h"
#include "trainer/sweep_file.h"

// What a sweep compares: bits, bytes and times; that each of them can differ.
using namespace gdn;
using namespace gdn::trainer;
namespace fs = std::filesystem;

namespace {

struct Folder {
  fs::path path = fs::temp_directory_path() / fmt::format("gdn_sweep_{}", getpid());
  Folder() {
    fs::remove_all(path);
    fs::create_directories(path);
  }
  ~Folder() { fs::remove_all(path); }
};

Setup small(const char* stack = "megatron") {
  return load_setup(std::string(std::getenv("GDN_EXAMPLES")) + "/tiny.yaml",
                    {{"stack", stack}, {"recompute_modules", "[]"}, {"seq_length", "16"}, {"num_hidden_layers", "2"}, {"full_attention_interval", "2"}, {"micro_batch_size", "1"}, {"global_batch_size", "1"}});
}

std::vector<SweepRow> sweep(const Setup& s, Device& device, const fs::path& file, size_t most) {
  const auto tokens = open_tokens(s.train, s.folder(), s.profile.model.vocab, s.profile.run.seq);
  Session session(s.profile.model, s.profile.run, device);
  Sweep sweep(session, s, *tokens, {.repeats = 1});
  size_t done = 0;
  return sweep.run(file, [&](const SweepRow&, size_t, size_t) { ++done; }, [&] { return done >= most; });
}

// One bit of one gradient is other than it should be, in replays alone.
class Unsteady final : public DecoratedDevice {
public:
  using DecoratedDevice::DecoratedDevice;
  void run(const OpCall& call) override {
    inner_.run(call);
    replayed_ = replayed_ || call.pass() == program::Pass::Replay;
    if (!replayed_ || call.name() != "in_proj.wgrad") return;
    replayed_ = false;
    auto* gradient = reinterpret_cast<float*>(call.param_grad(0, 1, call.op().params[0].elements).data);
    gradient[7] = std::nextafter(gradient[7], 1.0f);
  }

private:
  bool replayed_ = false;
};

SweepRow row(const char* name, Bytes peak, Bytes held, Bytes process, Bytes in_use, Seconds predicted, Seconds median) {
  SweepRow r;
  r.setting = name;
  r.predicted_peak = peak;
  r.measured_peak = held;
  r.predicted_process = process;
  r.measured_process = in_use;
  r.predicted_seconds = predicted;
  r.measured_seconds = r.median_seconds = r.slowest_seconds = median;
  return r;
}

} // namespace

TEST_CASE("fingerprint: changed by any bit and any exchange, the same for the same bits") {
  CpuDevice cpu;
  std::vector<float> x(1000);
  const reference::RandomStream random{.seed = 1};
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(random.normal(i));
  x[17] = 0;
  const auto n = static_cast<std::int64_t>(x.size());
  const kernels::Fingerprint whole = cpu.fingerprint(x.data(), n);
  CHECK(whole == cpu.fingerprint(std::vector<float>(x).data(), n));
  CHECK(whole != cpu.fingerprint(x.data(), n - 1));
  for (size_t i : {0, 1, 500, 999})
    for (int bit : {0, 15, 31}) {
      std::vector<float> y = x;
      std::uint32_t word = 0;
      std::memcpy(&word, &y[i], 4);
      word ^= 1u << bit;
      std::memcpy(&y[i], &word, 4);
      const kernels::Fingerprint other = cpu.fingerprint(y.data(), n);
      CHECK(other.low != whole.low);
      CHECK(other.high != whole.high);
    }
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    std::swap(x[i], x[i + 1]);
    CHECK(cpu.fingerprint(x.data(), n) != whole);
    std::swap(x[i], x[i + 1]);
  }
  x[17] = -0.0f; // equal as a number
  CHECK(cpu.fingerprint(x.data(), n) != whole);
}

TEST_CASE("sweep: one bit of one gradient, in replays only, is found and named; few modules come first") {
  const Folder folder;
  CpuDevice cpu;
  Unsteady device(cpu);
  const Setup s = small();
  const std::vector<SweepRow> rows = sweep(s, device, folder.path / "sweep.yaml", 100000);
  size_t differ = 0, modules = 0;
  for (const SweepRow& r : rows) {
    CAPTURE(r.setting);
    const bool full = r.setting.starts_with("full");
    const auto plus = full ? 99 : static_cast<size_t>(std::count(r.setting.begin(), r.setting.end(), '+'));
    CHECK(plus >= modules);
    modules = plus;
    if (r.setting == "none") CHECK(r.identical);
    if (r.setting == "gdn_qkv") CHECK(r.differs == "layers.0.gdn.in_proj");
    differ += !r.identical;
  }
  CHECK(differ > 10);
}

TEST_CASE("sweep: what a row says survives the file, and is predicted again without a device") {
  const Folder folder;
  CpuDevice cpu;
  const Setup s = small("native");
  const std::vector<SweepRow> rows = sweep(s, cpu, folder.path / "sweep.yaml", 20);
  const config::Profile file = read_sweep(folder.path / "sweep.yaml", "");
  const std::vector<SweepRow> again = predict_again(s, file);
  REQUIRE(again.size() == rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(rows[i].setting);
    CHECK(again[i].setting == rows[i].setting);
    CHECK(again[i].same_as == rows[i].same_as);
    CHECK(again[i].measured_peak == rows[i].measured_peak);
    CHECK(again[i].predicted_peak == rows[i].predicted_peak);
    CHECK(again[i].median_seconds == rows[i].median_seconds);
    CHECK(again[i].identical);
    CHECK(!again[i].planned); // no hardware profile is of this machine
  }
  CHECK_THROWS_WITH_AS(predict_again(small("megatron"), file), doctest::Contains("stack 'native'"), Error);

  // The same figures as if an H200 had measured them: times are the planner's then, and memory counts its context.
  config::Profile other = file;
  for (auto& [key, value] : other.identity) {
    if (key == "device") value = "NVIDIA H200";
    if (key == "provider") value = "own";
  }
  const std::vector<SweepRow> planned = predict_again(s, other);
  CHECK(planned.front().planned);
  CHECK(planned.front().predicted_seconds < 0.1); // microseconds of a GPU
  CHECK(planned.front().predicted_process > planned.front().predicted_peak + (100 << 20));
}

TEST_CASE("sweep: agreement, by hand") {
  const Bytes gib = Bytes{1} << 30;
  std::vector<SweepRow> rows{row("none", 10, 10, 100 * gib, 100 * gib, 1.00, 1.00), row("a", 9, 9, 100 * gib, 102 * gib, 1.10, 1.00),
                             row("b", 8, 9, 0, 0, 0.95, 1.10), row("c", 8, 9, 0, 0, 9, 1.10)};
  rows[3].same_as = "b";
  rows[2].identical = false;
  const SweepAgreement a = agreement_of(rows);
  CHECK(a.settings == 3);
  CHECK(a.exact_peaks == 2);
  CHECK(a.identical == 2);
  CHECK(a.processes == 2);
  CHECK(a.processes_within == 1);
  CHECK(a.process_worst == doctest::Approx(100.0 / 102 - 1));
  CHECK(a.time_mean == doctest::Approx((0 + 0.1 + 1 - 0.95 / 1.1) / 3));
  CHECK(a.time_worst == doctest::Approx(0.95 / 1.1 - 1));
  CHECK(a.pairs == 2); // none and a take as long
  CHECK(a.ordered == 0);
  CHECK(a.overlapping == 0);
  rows[1].slowest_seconds = 1.2; // one run of a took longer than all of b
  CHECK(agreement_of(rows).overlapping == 1);
}
