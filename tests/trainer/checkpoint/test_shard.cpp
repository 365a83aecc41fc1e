#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "shards.h"
#include "trainer/checkpoint/hash.h"

using namespace gdn;
using namespace gdn::trainer::checkpoint;
using test::held_by;

namespace {

model::ParameterTable table(const char* stack = "native") {
  config::Model m;
  m.name = "test";
  m.hidden = 16;
  m.vocab = 64;
  m.mixers = {config::LayerKind::Gdn, config::LayerKind::Attention, config::LayerKind::Gdn2};
  m.mlps = {config::MlpKind::Moe, config::MlpKind::Dense, config::MlpKind::Moe};
  m.gdn.key_heads = 2;
  m.gdn.value_heads = 4;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 4;
  m.attention.heads = 4;
  m.attention.kv_heads = 2;
  m.attention.head_dim = 4;
  m.moe.experts = 4;
  m.moe.top_k = 2;
  m.moe.ffn = 4;
  m.moe.shared_ffn = 4;
  m.ffn = 8;
  config::Run run;
  run.stack = stack;
  return model::parameter_table(m, run);
}

} // namespace

TEST_CASE("shard: UC-20, 5152 rows of q|k|v|z|beta|alpha under tp 2, section by section") {
  model::Parameter p;
  p.name = "layers.0.gdn.in_proj";
  p.shape = {5152, 2};
  using model::ShardRule;
  p.sections = {{"q", 512, ShardRule::Column}, {"k", 512, ShardRule::Column}, {"v", 2048, ShardRule::Column},
                {"z", 2048, ShardRule::Column}, {"beta", 16, ShardRule::Column}, {"alpha", 16, ShardRule::Column}};
  config::Parallel parallel;
  parallel.tp = 2;
  const Shard second = shard_of(p, parallel, {.tp = 1});
  CHECK(second.count == 2576 * 2);
  // The last section of the second rank is its own rows [5144, 5152), not the tail of an even split.
  std::vector<std::string> boxes;
  for (const Box& b : second.boxes) boxes.push_back(text_of(b));
  CHECK(boxes == std::vector<std::string>{"256:512,0:2", "768:1024,0:2", "2048:3072,0:2", "4096:5120,0:2", "5128:5136,0:2", "5144:5152,0:2"});
}

TEST_CASE("shard: every parameter, topology and rank, against asking every element") {
  int compared = 0;
  for (const char* stack : {"native", "megatron"}) {
    const model::ParameterTable parameters = table(stack);
    for (auto [tp, ep, etp] : {std::tuple{1, 1, 1}, {2, 1, 1}, {1, 2, 1}, {2, 4, 1}, {1, 1, 2}, {2, 2, 2}})
      for (const test::ParallelRank& r : test::ranks_of(tp, ep, etp))
        for (const model::Parameter& p : parameters.parameters) {
          const Shard shard = shard_of(p, r.parallel, r.ranks);
          INFO(p.name << " tp " << tp << " ep " << ep << " etp " << etp);
          CHECK(held_by(shard, p.shape) == held_by(p, r));
          ++compared;
        }
  }
  CHECK(compared > 500);
}

TEST_CASE("shard: parts of a divided optimizer are what a cut through the flat order gives") {
  const model::ParameterTable parameters = table();
  for (const test::ParallelRank& r : test::ranks_of(2, 2, 2))
    for (const model::Parameter& p : parameters.parameters) {
      const Shard shard = shard_of(p, r.parallel, r.ranks);
      const std::vector<std::int64_t> all = held_by(p, r);
      for (std::int64_t cut : {std::int64_t{0}, shard.count / 3, shard.count}) {
        INFO(p.name << " cut " << cut);
        CHECK(held_by(part_of(shard, 0, cut), p.shape) == std::vector<std::int64_t>(all.begin(), all.begin() + cut));
        const std::vector<std::int64_t> rest = held_by(part_of(part_of(shard, cut, shard.count - cut), 0, shard.count - cut), p.shape);
        CHECK(rest == std::vector<std::int64_t>(all.begin() + cut, all.end()));
      }
    }
}

TEST_CASE("shard: text of boxes") {
  const Shape shape{4, 10};
  CHECK(text_of(parse_box("0:4,3:7", shape)) == "0:4,3:7");
  CHECK(parse_box("2:2,0:10", shape).elements() == 0);
  for (const char* bad : {"", "0:4", "0:4,3:11", "3:2,0:1", "0:4,0:10,0:1", "0:4;0:10", "-1:4,0:10", "0:4,0:10 ", "a:b,c:d", "0:99999999999999999999,0:1"})
    CHECK_THROWS_AS(parse_box(bad, shape), Error);
}

TEST_CASE("hash: every changed bit and every cut is seen") {
  std::vector<unsigned char> bytes(61);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(3));
  const auto hash = [&] { return hash_of(std::as_bytes(std::span(bytes))); };
  const std::string whole = hash();
  CHECK(whole.size() == 16);
  for (size_t i = 0; i < bytes.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= static_cast<unsigned char>(1 << bit);
      CHECK(hash() != whole);
      bytes[i] ^= static_cast<unsigned char>(1 << bit);
    }
  CHECK(hash() == whole);
  for (size_t n = 0; n < bytes.size(); ++n) CHECK(hash_of(std::as_bytes(std::span(bytes.data(), n))) != whole);
  std::swap(bytes[0], bytes[8]); // words change places
  CHECK(hash() != whole);
}
