// Exchanges between two GPUs through NCCL, one thread a GPU: against sums on the CPU in the order of the ranks,
// bit by bit; repeated; unequal parts; a peer that never comes must end in an error, not a hang, and whichever group or pair it
// left waiting, no other group's sum on the host may pass then.
//   nccl_check [bench]
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "tests/gpu/device.h"
#include "trainer/comm/nccl_connection.h"
#include "trainer/comm/nccl_world.h"

using namespace gdn;
using namespace gdn::gpu_test;
using trainer::Communicator;
using trainer::Part;

namespace {

constexpr int kRanks = 2;

// Host exchanges between threads: what MPI is between processes. Only what NCCL's start and the checks need.
struct Meeting {
  std::barrier<> all{kRanks};
  const std::byte* given[kRanks] = {};
  std::mutex mutex;
  std::condition_variable posted;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> messages; // by receiver and tag
};
class Threads final : public Communicator {
public:
  Threads(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return kRanks; }
  void all_gather(const std::byte* mine, std::byte* all, Bytes bytes) override {
    meeting_.given[rank_] = mine;
    meeting_.all.arrive_and_wait();
    for (int r = 0; r < kRanks; ++r) std::memcpy(all + r * bytes, meeting_.given[r], static_cast<std::size_t>(bytes));
    meeting_.all.arrive_and_wait();
  }
  void barrier() override { meeting_.all.arrive_and_wait(); }
  void all_reduce(std::byte*, std::int64_t, DType, trainer::Reduction) override { unused(); }
  void reduce_scatter(const std::byte*, std::byte*, std::int64_t, DType) override { unused(); }
  void all_to_all(std::span<const Part>, std::span<const Part>) override { unused(); }
  void send(int to, int tag, const std::byte* data, Bytes bytes) override {
    const std::lock_guard lock(meeting_.mutex);
    meeting_.messages[{to, tag}].emplace_back(data, data + bytes);
    meeting_.posted.notify_all();
  }
  void receive(int, int tag, std::byte* data, Bytes bytes) override {
    std::unique_lock lock(meeting_.mutex);
    auto& mine = meeting_.messages[{rank_, tag}];
    meeting_.posted.wait(lock, [&] { return !mine.empty(); });
    std::memcpy(data, mine.front().data(), static_cast<std::size_t>(bytes));
    mine.pop_front();
  }
  void sum_on_host(std::span<double>) override { unused(); }

private:
  [[noreturn]] static void unused() { throw Error(ErrorCode::Internal, "not between threads"); }
  Meeting& meeting_;
  int rank_;
};
class ThreadWorld final : public trainer::World {
public:
  ThreadWorld(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return kRanks; }
  std::unique_ptr<Communicator> group(const std::vector<int>& members) override {
    if (members.size() == 1) return trainer::Alone().group(members);
    return std::make_unique<Threads>(meeting_, rank_);
  }
  void abort(int) override {}

private:
  Meeting& meeting_;
  int rank_;
};

std::mutex report;
int failures = 0;
void expect(bool ok, const std::string& what) {
  const std::lock_guard lock(report);
  failures += !ok;
  std::printf("%s: %s\n", what.c_str(), ok ? "right" : "FAILED");
  std::fflush(stdout);
}

template <class T> std::vector<T> values(std::int64_t count, int rank) {
  Random random{static_cast<std::uint64_t>(100 + rank)};
  std::vector<T> out(static_cast<std::size_t>(count));
  for (auto& x : out) {
    if constexpr (std::is_same_v<T, Bf16>) x = to_bf16(static_cast<float>(random.normal()));
    else x = static_cast<T>(1000 * random.normal());
  }
  return out;
}
template <class T> T sum(T a, T b) { return a + b; }
template <> Bf16 sum(Bf16 a, Bf16 b) { return to_bf16(to_float(a) + to_float(b)); }
template <class T> std::byte* bytes_of(const DeviceArray<T>& x) { return reinterpret_cast<std::byte*>(x.get()); }
template <class T> bool equal(const std::vector<T>& a, const std::vector<T>& b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0; }

template <class T> void check_sums(Communicator& group, cudaStream_t stream, DType dtype, std::int64_t count, const std::string& name) {
  const auto mine = values<T>(count, group.rank()), first = values<T>(count, 0), second = values<T>(count, 1);
  std::vector<T> want(mine.size());
  for (std::size_t i = 0; i < want.size(); ++i) want[i] = sum(first[i], second[i]);
  DeviceArray<T> data(mine);
  bool right = true;
  for (int repeat = 0; repeat < 3; ++repeat) {
    data.upload(mine);
    group.all_reduce(bytes_of(data), count, dtype);
    GDN_CUDA(cudaStreamSynchronize(stream));
    right &= equal(data.download(), want) && data.guard_intact();
  }
  expect(right, name + " all_reduce of " + std::to_string(count) + ", rank " + std::to_string(group.rank()));
  const std::int64_t half = count / 2;
  data.upload(mine);
  DeviceArray<T> part(static_cast<std::size_t>(half));
  group.reduce_scatter(bytes_of(data), bytes_of(part), half, dtype);
  GDN_CUDA(cudaStreamSynchronize(stream));
  const auto from = static_cast<std::ptrdiff_t>(group.rank() * half);
  expect(equal(part.download(), std::vector<T>(want.begin() + from, want.begin() + from + half)) && part.guard_intact(),
         name + " reduce_scatter of " + std::to_string(2 * half) + ", rank " + std::to_string(group.rank()));
}

void check_moves(Communicator& group, cudaStream_t stream) {
  const int me = group.rank();
  const std::vector<int> rows[kRanks] = {values<int>(1000, 0), values<int>(1000, 1)};
  DeviceArray<int> mine(rows[me]), all(2000);
  group.all_gather(bytes_of(mine), bytes_of(all), 4000);
  GDN_CUDA(cudaStreamSynchronize(stream));
  std::vector<int> want(rows[0]);
  want.insert(want.end(), rows[1].begin(), rows[1].end());
  expect(equal(all.download(), want), "all_gather, rank " + std::to_string(me));
  // Rank r sends 100 (r + 1) ints to 0 and 37 (r + 1) to 1; what it keeps for itself moves too.
  auto count = [](int from, int to) { return (to == 0 ? 100 : 37) * (from + 1); };
  DeviceArray<int> got(static_cast<std::size_t>(count(0, me) + count(1, me)));
  const Part to[] = {{bytes_of(mine), 4 * count(me, 0)}, {bytes_of(mine) + 4 * 500, 4 * count(me, 1)}};
  const Part from[] = {{bytes_of(got), 4 * count(0, me)}, {bytes_of(got) + 4 * count(0, me), 4 * count(1, me)}};
  group.all_to_all(to, from);
  GDN_CUDA(cudaStreamSynchronize(stream));
  want.clear();
  for (int r = 0; r < kRanks; ++r) want.insert(want.end(), rows[r].begin() + (me == 0 ? 0 : 500), rows[r].begin() + (me == 0 ? 0 : 500) + count(r, me));
  expect(equal(got.download(), want) && got.guard_intact(), "all_to_all, rank " + std::to_string(me));
}

// Median of ten in seconds, with bytes a rank sends.
void bench(Communicator& group, cudaStream_t stream) {
  cudaEvent_t before, after;
  GDN_CUDA(cudaEventCreate(&before));
  GDN_CUDA(cudaEventCreate(&after));
  for (const Bytes bytes : {Bytes{1} << 16, Bytes{1} << 20, Bytes{1} << 24, Bytes{1} << 26, Bytes{1} << 28}) {
    DeviceArray<char> a(static_cast<std::size_t>(bytes)), b(static_cast<std::size_t>(bytes));
    GDN_CUDA(cudaMemset(a.get(), 0, a.size()));
    const Part halves[] = {{bytes_of(a), bytes / 2}, {bytes_of(a) + bytes / 2, bytes / 2}}, places[] = {{bytes_of(b), bytes / 2}, {bytes_of(b) + bytes / 2, bytes / 2}};
    const std::map<std::string, std::pair<double, std::function<void()>>> all = { // bytes a rank sends
        {"all_reduce fp32", {double(bytes), [&] { group.all_reduce(bytes_of(a), bytes / 4, DType::FP32); }}},
        {"all_reduce bf16", {double(bytes), [&] { group.all_reduce(bytes_of(a), bytes / 2, DType::BF16); }}},
        {"all_gather", {double(bytes) / 2, [&] { group.all_gather(bytes_of(a), bytes_of(b), bytes / 2); }}},
        {"reduce_scatter", {double(bytes) / 2, [&] { group.reduce_scatter(bytes_of(a), bytes_of(b), bytes / 8, DType::FP32); }}},
        {"all_to_all", {double(bytes) / 2, [&] { group.all_to_all(halves, places); }}}};
    for (const auto& [name, work] : all) {
      std::vector<float> ms;
      for (int i = 0; i < 13; ++i) {
        group.barrier();
        GDN_CUDA(cudaEventRecord(before, stream));
        work.second();
        GDN_CUDA(cudaEventRecord(after, stream));
        GDN_CUDA(cudaStreamSynchronize(stream));
        float t = 0;
        GDN_CUDA(cudaEventElapsedTime(&t, before, after));
        if (i >= 3) ms.push_back(t);
      }
      std::sort(ms.begin(), ms.end());
      if (group.rank() == 0) std::printf("%-16s %10ld bytes: %9.1f us, %6.1f GB/s sent\n", name.c_str(), long(bytes), 1e3 * ms[5], work.first / ms[5] / 1e6);
    }
  }
}

// Of groups larger than the two of here, those whose size is no power of two as well: a block of everybody's pieces fits.
void check_blocks() {
  bool fits = true;
  for (const Bytes element : {2, 4, 8})
    for (std::int64_t ranks = 2; ranks <= 4096; ++ranks) {
      const std::int64_t piece = trainer::Connection::piece_of(element, ranks);
      fits &= piece > 0 && piece * ranks * element <= trainer::Connection::kStaging;
    }
  expect(fits, "pieces of up to 4096 ranks in the staging memory");
}

// A rank goes on alone after `warm`, which both do: `left` of rank 0 then waits for somebody who never comes. The watchdog ends
// that, and neither the next exchange nor a sum on the host of another group passes.
void check_silence(Meeting& meeting, ThreadWorld& host, cudaStream_t stream, const std::string& what, const std::function<void(Communicator&, std::byte*)>& warm,
                   const std::function<void(Communicator&, std::byte*)>& left) {
  const auto world = trainer::start_nccl(host, {.compute = stream, .patience = 3});
  const auto group = world->group({0, 1}), alone = world->group({host.rank()});
  DeviceArray<float> data(values<float>(1 << 20, host.rank()));
  warm(*group, bytes_of(data));
  GDN_CUDA(cudaStreamSynchronize(stream));
  alone->sum_on_host({}); // nothing has failed yet
  if (host.rank() == 0) {
    const auto start = std::chrono::steady_clock::now();
    auto message = [](auto&& call) -> std::string {
      try {
        call();
      } catch (const Error& e) {
        return e.code() == ErrorCode::Nccl ? e.what() : "";
      }
      return "";
    };
    auto refused = [](const std::string& m) { return m.find("no answer") != std::string::npos; };
    left(*group, bytes_of(data)); // queued
    const std::string elsewhere = message([&] { alone->sum_on_host({}); }), barrier = message([&] { alone->barrier(); }),
                      next = message([&] { left(*group, bytes_of(data)); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    expect(refused(elsewhere) && refused(barrier) && refused(next) && seconds < 20,
           what + ", a lost peer after " + std::to_string(seconds) + " s: " + next + "; another group: " + elsewhere);
  }
  meeting.all.arrive_and_wait();
}

void run_rank(Meeting& meeting, int rank, bool timing) try {
  GDN_CUDA(cudaSetDevice(rank));
  cudaStream_t stream;
  GDN_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ThreadWorld host(meeting, rank);
  {
    const auto world = trainer::start_nccl(host, {.compute = stream, .patience = 60});
    const auto group = world->group({0, 1});
    if (timing) {
      bench(*group, stream);
    } else {
      for (const std::int64_t count : {std::int64_t{2}, std::int64_t{1001}, std::int64_t{40'000'001}}) {
        check_sums<float>(*group, stream, DType::FP32, count, "fp32");
        check_sums<Bf16>(*group, stream, DType::BF16, count, "bf16");
      }
      check_moves(*group, stream);
    }
    group->barrier();
  }
  if (timing) return;
  auto sum = [](Communicator& group, std::byte* data) { group.all_reduce(data, 1 << 20, DType::FP32); };
  check_silence(meeting, host, stream, "a sum", sum, sum);
  auto message = [](Communicator& group, std::byte* data) {
    if (group.rank() == 1) group.send(0, 0, data, 4 << 20);
    else group.receive(1, 0, data, 4 << 20);
  };
  check_silence(meeting, host, stream, "a message", message, message);
} catch (const Error& e) {
  std::printf("rank %d: error: %s\n", rank, e.what());
  std::fflush(stdout);
  std::_Exit(1); // the other thread waits for this one
}

} // namespace

int main(int argc, char** argv) {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess;
  cudaGetLastError();
  if (!found || count < kRanks) {
    std::printf("two GPUs are needed, %d found\n", found ? count : 0);
    return kSkip;
  }
  const bool timing = argc > 1 && std::strcmp(argv[1], "bench") == 0;
  std::printf("NCCL %s\n", trainer::nccl_version().c_str());
  check_blocks();
  Meeting meeting;
  {
    std::jthread other([&] { run_rank(meeting, 1, timing); });
    run_rank(meeting, 0, timing);
  }
  std::printf("%s\n", failures == 0 ? "all right" : "FAILURES");
  return failures == 0 ? 0 : 1;
}
