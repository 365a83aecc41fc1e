#include <doctest/doctest.h>

#include "config/profiles.h"
#include "plan/estimate.h"

using namespace gdn;

// Memory outside the tensors: communicators that a layout creates, by channel; CUDA graphs.
namespace {

struct OutsideCase {
  config::ModelProfile profile;
  config::Hardware hardware = config::Profiles().hardware("h100");

  OutsideCase(const char* model, std::vector<config::Setting> settings) : profile(config::Profiles().model(model, settings)) {}
  std::vector<plan::Communicator> groups() const { return plan::communicators(profile.model, profile.run); }
  // Bytes of the rows whose name holds `text`.
  Bytes bytes(const std::string& text) const {
    Bytes sum = 0;
    for (const plan::OutsideRow& row : plan::outside_rows(profile.model, profile.run, hardware, "upstream")) {
      CHECK(!row.source.empty());
      if (row.name.find(text) != std::string::npos) sum += row.bytes;
    }
    return sum;
  }
  const plan::Communicator* group(const std::string& name) const {
    static std::vector<plan::Communicator> all;
    all = groups();
    for (const plan::Communicator& c : all)
      if (c.name == name) return &c;
    return nullptr;
  }
};

constexpr Bytes kRing = 24 * 28670000;           // nccl#964: 688 MB
constexpr Bytes kPeer = Bytes{32} * 10 * 1024 * 1024; // nccl#1685
constexpr Bytes kPool = Bytes{512} * 1024 * 1024;     // nccl#2363

} // namespace

TEST_CASE("one GPU has no communicator") {
  const OutsideCase c("qwen3.5-35b-a3b", {{"gpus", "1"}, {"expert_model_parallel_size", "1"}});
  CHECK(c.groups().empty());
  CHECK(c.bytes("NCCL") == 0);
  CHECK(c.bytes("context") == kGiB);
}

TEST_CASE("a provider's own row stands in place of anyone's of the same name") {
  const config::Hardware h200 = config::Profiles().hardware("h200");
  auto context = [&](const char* provider) {
    Bytes sum = 0;
    for (const config::ReserveRow& row : h200.reserve_of(provider))
      if (row.name == "context") sum += row.bytes;
    return sum;
  };
  CHECK(context("upstream") == kGiB);
  CHECK(context("cpu") == kGiB);
  CHECK(context("own") == Bytes{553} * 1024 * 1024); // the median of 1,968 swept settings
}

TEST_CASE("each group of the layout with its ranks: rings by channels, pairwise exchange by channels and peers") {
  const OutsideCase c("qwen3.5-35b-a3b", {{"gpus", "32"}, {"tensor_model_parallel_size", "2"}, {"sequence_parallel", "true"}, {"context_parallel_size", "2"},
                                   {"pipeline_model_parallel_size", "2"}, {"expert_model_parallel_size", "4"}, {"expert_tensor_parallel_size", "2"}});
  const std::vector<std::pair<const char*, std::int64_t>> expected{
      {"all ranks", 32}, {"tensor parallel", 2}, {"context parallel", 2}, {"data parallel", 8}, {"expert parallel", 4},
      {"expert tensor and expert parallel", 8}, {"expert data parallel", 2}, {"pipeline parallel", 2}};
  CHECK(c.groups().size() == expected.size());
  for (const auto& [name, ranks] : expected) {
    CAPTURE(std::string(name));
    REQUIRE(c.group(name));
    CHECK(c.group(name)->ranks == ranks);
  }
  CHECK(c.bytes("NCCL, tensor parallel") == kRing);
  CHECK(c.bytes("NCCL, expert parallel") == 3 * kPeer);
  CHECK(c.bytes("NCCL, context parallel") == kPeer); // heads around the delta rule go to the other rank
  CHECK(c.bytes("NCCL, pipeline parallel") == kPool); // the other stage's 16 GPUs are two other nodes
  CHECK(c.bytes("NCCL") == 5 * kRing + 4 * kPeer + kPool);
}

TEST_CASE("experts over two nodes: 7 peers by NVLink, one pool for those of the other node") {
  const OutsideCase c("qwen3.5-35b-a3b", {{"gpus", "16"}, {"expert_model_parallel_size", "16"}});
  CHECK(c.bytes("NCCL, expert parallel") == 7 * kPeer + kPool);
}

TEST_CASE("near is who shares a node, whatever the group's size") {
  // Expert parallel ranks are expert-TP ranks apart: 8 of 8 each fill a node each.
  const std::vector<config::Setting> tp8{{"gpus", "64"}, {"tensor_model_parallel_size", "8"}, {"sequence_parallel", "true"}, {"expert_model_parallel_size", "8"}};
  auto experts = [&](const char* etp) {
    std::vector<config::Setting> s = tp8;
    s.push_back({"expert_tensor_parallel_size", etp});
    return OutsideCase("qwen3.5-35b-a3b", s).bytes("NCCL, expert parallel");
  };
  CHECK(experts("8") == kPool);
  CHECK(experts("4") == kPeer + kPool);
  CHECK(experts("1") == 7 * kPeer);
  auto pipeline = [](const char* gpus) { // 8 stages
    return OutsideCase("qwen3.5-35b-a3b", {{"gpus", gpus}, {"pipeline_model_parallel_size", "8"}, {"expert_model_parallel_size", "1"}}).bytes("NCCL, pipeline parallel");
  };
  CHECK(pipeline("8") == 2 * kPeer);       // stages of one GPU: both neighbours in the node
  CHECK(pipeline("32") == kPeer + kPool);  // two stages a node
  CHECK(pipeline("64") == kPool);          // a node a stage
}

TEST_CASE("attention's exchange under context parallelism decides who is a peer") {
  auto peers = [](const char* type) {
    const OutsideCase c("llama3-70b", {{"gpus", "8"}, {"tensor_model_parallel_size", "1"}, {"sequence_parallel", "false"}, {"pipeline_model_parallel_size", "1"},
                                {"virtual_pipeline_model_parallel_size", "1"}, {"context_parallel_size", "8"}, {"cp_comm_type", type}});
    return c.bytes("NCCL, context parallel");
  };
  CHECK(peers("p2p") == 2 * kPeer);
  CHECK(peers("a2a") == 7 * kPeer);
  CHECK(peers("all_gather") == kRing);
}

TEST_CASE("CUDA graphs: inputs by layers and micro-batches in flight, launches by micro-batches where PP > 1") {
  auto rows = [](std::vector<config::Setting> more) {
    more.push_back({"cuda_graph_scope", "[attn]"});
    const OutsideCase c("qwen3.5-35b-a3b", std::move(more));
    plan::Estimator e(c.profile.model, c.profile.run, c.hardware);
    std::pair<Bytes, std::string> out{0, ""};
    const plan::Estimate estimate = e.evaluate({});
    for (const plan::OutsideRow& row : estimate.outside) {
      if (row.name.find("static inputs") != std::string::npos) out.first = row.bytes;
      if (row.name.find("recorded launches") != std::string::npos) out.second = row.name;
    }
    return out;
  };
  const Bytes one = Bytes{2} * 4096 * 2048 * 2; // an input and an output gradient of 4,096 tokens
  CHECK(rows({}).first == 0);
  CHECK(rows({{"cuda_graph_impl", "transformer_engine"}}).first == 40 * one);
  // PP 4 over 32 GPUs: 10 layers on rank 0, 4 micro-batches in flight.
  const std::vector<config::Setting> pp4{{"gpus", "32"}, {"pipeline_model_parallel_size", "4"}, {"global_batch_size", "64"}};
  auto with = [&](const char* impl) {
    std::vector<config::Setting> s = pp4;
    s.push_back({"cuda_graph_impl", impl});
    return rows(s);
  };
  CHECK(with("transformer_engine").first == 10 * 4 * one);
  CHECK(with("local").first == 10 * 4 * one);
  // 8 micro-batches a pipeline: twice the graphs of the 4 in flight.
  auto launches = [](const std::string& name) { return std::stoll(name.substr(name.find(", ") + 2)); };
  CHECK(launches(with("transformer_engine").second) == 2 * launches(with("local").second));
  CHECK(rows({{"cuda_graph_impl", "full_iteration"}}).first == 0); // one graph, whose inputs are token ids
}
