// Exchanges by hand.
#include <numeric>

#include "core/error.h"
#include "tests/trainer/ranks/ranks.h"

using namespace gdn;
using namespace gdn::trainer;
using ranks_test::world;

namespace {

std::byte* bytes(auto& v) { return reinterpret_cast<std::byte*>(v.data()); }

std::unique_ptr<Communicator> everybody() {
  std::vector<int> all(static_cast<size_t>(world().size()));
  std::iota(all.begin(), all.end(), 0);
  return world().group(all);
}

void exchanges() {
  const auto group = everybody();
  const int n = group->size(), me = group->rank();
  std::vector<float> sum{1.0f * static_cast<float>(me + 1), -2.0f};
  group->all_reduce(bytes(sum), 2, DType::FP32);
  CHECK(sum == std::vector<float>{static_cast<float>(n * (n + 1) / 2), -2.0f * static_cast<float>(n)});
  std::vector<std::int32_t> top{me, 10 - me};
  group->all_reduce(bytes(top), 2, DType::Int32, Reduction::Max);
  CHECK(top == std::vector<std::int32_t>{n - 1, 10});

  std::vector<std::int32_t> mine{me, 10 * me}, all(static_cast<size_t>(2 * n));
  group->all_gather(bytes(mine), bytes(all), 8);
  for (int r = 0; r < n; ++r) CHECK((all[static_cast<size_t>(2 * r)] == r && all[static_cast<size_t>(2 * r + 1)] == 10 * r));

  std::vector<float> parts(static_cast<size_t>(n)), part(1);
  for (int r = 0; r < n; ++r) parts[static_cast<size_t>(r)] = static_cast<float>(100 * r + me);
  group->reduce_scatter(bytes(parts), bytes(part), 1, DType::FP32);
  CHECK(part[0] == static_cast<float>(n * 100 * me + n * (n - 1) / 2));

  // Rank a sends a + b bytes of value a to rank b.
  std::vector<std::vector<std::byte>> sent, got;
  std::vector<Part> to, from;
  for (int r = 0; r < n; ++r) {
    sent.emplace_back(static_cast<size_t>(me + r), static_cast<std::byte>(me));
    got.emplace_back(static_cast<size_t>(me + r), std::byte{0xff});
  }
  for (int r = 0; r < n; ++r) {
    to.push_back({sent[static_cast<size_t>(r)].data(), me + r});
    from.push_back({got[static_cast<size_t>(r)].data(), me + r});
  }
  group->all_to_all(to, from);
  for (int r = 0; r < n; ++r) CHECK(got[static_cast<size_t>(r)] == std::vector<std::byte>(static_cast<size_t>(me + r), static_cast<std::byte>(r)));

  // Everybody sends before anybody receives.
  std::vector<double> message{1.5 * me, 7}, received(2);
  group->send((me + 1) % n, 3, bytes(message), 16);
  group->receive((me + n - 1) % n, 3, bytes(received), 16);
  CHECK(received == std::vector<double>{1.5 * ((me + n - 1) % n), 7});
  group->barrier();
}

// 1 + 2^-9 is no bf16: sums are made in fp32 and rounded once.
void rounds_once() {
  const auto group = everybody();
  std::vector<std::uint16_t> x{static_cast<std::uint16_t>(group->rank() == 0 ? 0x3f80 : 0x3b00)}; // 1, or 2^-9
  group->all_reduce(bytes(x), 1, DType::BF16);
  CHECK(x[0] == (group->size() == 2 ? 0x3f80 : 0x3f81)); // 1 + 2^-9 rounds to 1; 1 + 3 * 2^-9 up to 1 + 2^-7
}

} // namespace

TEST_CASE("2 ranks: exchanges") { exchanges(); }
TEST_CASE("4 ranks: exchanges") { exchanges(); }
TEST_CASE("2 ranks: bf16 is rounded once") { rounds_once(); }
TEST_CASE("4 ranks: bf16 is rounded once") { rounds_once(); }

TEST_CASE("2 ranks: a run for another number of ranks is refused") {
  try {
    Ranks(world(), config::Parallel{.tp = 4, .gpus = 4});
    FAIL("it was not");
  } catch (const Error& e) {
    CHECK(std::string(e.what()).find("the run is for 4 ranks (tp 4") != std::string::npos);
    CHECK(e.hint() == "start it with mpirun -n 4, or srun -n 4");
  }
}
