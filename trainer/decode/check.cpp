#include "trainer/decode/check.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <numeric>
#include <set>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "reference/random.h"
#include "reference/view.h"
#include "trainer/cpu/device.h"
#include "trainer/decode/decoder.h"

namespace gdn::trainer {

namespace {

constexpr size_t kRequests = std::size(kDecodeLengths);

// All requests together, and what their logits should be.
struct Expected {
  Batch batch;
  std::vector<float> logits; // [tokens, vocab]
  double largest = 0;
  bool by_norm = false;      // how logits are compared: L2, or the largest difference
  double allowed = kDecodeTolerance;
};

Batch all_requests(std::int64_t vocab) {
  Batch batch;
  batch.sequences = {0};
  const reference::RandomStream random{.seed = 1234};
  for (std::int64_t length : kDecodeLengths) batch.sequences.push_back(batch.sequences.back() + length);
  for (std::int64_t t = 0; t < batch.sequences.back(); ++t)
    batch.ids.push_back(static_cast<std::int64_t>(random.bits(static_cast<std::uint64_t>(t)) % static_cast<std::uint64_t>(vocab)));
  batch.labels = batch.ids;
  return batch;
}

std::vector<float> full_forward(Session& session, const Batch& batch) {
  const std::vector<float> padded = run_traced(session, batch).logits;
  const size_t columns = padded.size() / batch.ids.size();
  std::vector<float> logits;
  for (size_t t = 0; t < batch.ids.size(); ++t) {
    const auto row = padded.begin() + static_cast<std::ptrdiff_t>(t * columns);
    logits.insert(logits.end(), row, row + session.model().vocab);
  }
  return logits;
}

// How far rows of logits are from the expected ones, collected.
class Distance {
public:
  explicit Distance(const Expected& expected) : expected_(&expected) {}
  void add(std::span<const float> found, size_t first) { // values first .. of the expected
    for (size_t i = 0; i < found.size(); ++i) {
      const double y = expected_->logits[first + i], d = std::abs(static_cast<double>(found[i]) - y);
      if (!(d <= largest_) && !std::isnan(largest_)) largest_ = d; // NaN stays
      squares_ += d * d;
      norm_ += y * y;
    }
  }
  double off() const { return expected_->by_norm ? (squares_ == 0 ? 0 : std::sqrt(squares_ / norm_)) : largest_ / expected_->largest; }

private:
  const Expected* expected_;
  double largest_ = 0, squares_ = 0, norm_ = 0;
};

// The full forward on the CPU with the weights that the session's ops read.
std::vector<float> forward_on_cpu(Session& session, DType dtype, const Batch& batch) {
  config::Run run = session.run_settings();
  run.dtype = dtype;
  CpuDevice cpu;
  Session other(session.model(), run, cpu);
  for (const ParameterSlot& slot : session.parameters().slots()) {
    std::vector<float> w = session.parameters().weights(slot.name());
    if (slot.dtype == DType::BF16)
      for (float& x : w) x = static_cast<float>(reference::round_to_bf16(static_cast<double>(x)));
    other.parameters().set_weights(slot.name(), w);
  }
  other.use({});
  return full_forward(other, batch);
}

Expected expected_of(Session& session) {
  Expected e;
  e.batch = all_requests(session.model().vocab);
  e.by_norm = session.run_settings().dtype == DType::BF16;
  e.logits = e.by_norm ? forward_on_cpu(session, DType::FP32, e.batch) : full_forward(session, e.batch);
  for (float x : e.logits) e.largest = std::max(e.largest, std::abs(static_cast<double>(x)));
  if (!e.by_norm) return e;
  Distance rounded(e);
  rounded.add(forward_on_cpu(session, DType::BF16, e.batch), 0);
  e.allowed = 2 * std::max(rounded.off(), 0x1p-9);
  return e;
}

// Feeds requests into a decoder and compares what comes out.
class Run {
public:
  Run(Session& session, const Expected& expected)
      : expected_(expected), distance_(expected), vocab_(static_cast<size_t>(session.model().vocab)), layers_(session.model().layers()), device_(session.device()),
        decoder_(session.model(), session.run_settings(), session.device(), session.parameters(), kRequests, *std::max_element(std::begin(kDecodeLengths), std::end(kDecodeLengths))) {}

  Decoder& decoder() { return decoder_; }
  void restart() {
    distance_ = Distance(expected_);
    for (size_t r = 0; r < kRequests; ++r) decoder_.pool().reset(slot(r));
  }
  // Appends so many tokens to each of the requests, in one pass; their logits.
  std::vector<float> append(const std::vector<std::pair<size_t, std::int64_t>>& counts) {
    std::vector<NewTokens> requests;
    std::vector<size_t> rows; // of the full forward
    for (const auto& [r, count] : counts) {
      NewTokens n{slot(r), {}};
      const std::int64_t first = expected_.batch.sequences[r] + decoder_.pool().length(slot(r));
      for (std::int64_t t = first; t < first + count; ++t) {
        n.ids.push_back(expected_.batch.ids[static_cast<size_t>(t)]);
        rows.push_back(static_cast<size_t>(t));
      }
      requests.push_back(std::move(n));
    }
    std::vector<float> logits = decoder_.append(requests);
    for (size_t i = 0; i < rows.size(); ++i) distance_.add(std::span(logits).subspan(i * vocab_, vocab_), rows[i] * vocab_);
    return logits;
  }
  // A pass of `prefill(r)` tokens of every request r, then one token of every request that has one left; the others drop
  // out. Logits of all passes.
  std::vector<float> packed(const std::function<std::int64_t(std::int64_t)>& prefill) {
    std::vector<std::int64_t> left(std::begin(kDecodeLengths), std::end(kDecodeLengths));
    std::vector<std::pair<size_t, std::int64_t>> pass;
    std::vector<float> logits;
    std::int64_t tokens = 0;
    for (size_t r = 0; r < kRequests; ++r) {
      pass.emplace_back(r, prefill(left[r])); // none is legal: an empty request changes nothing
      left[r] -= pass.back().second;
      tokens += pass.back().second;
    }
    while (true) {
      if (tokens > 0) {
        const std::vector<float> more = append(pass);
        logits.insert(logits.end(), more.begin(), more.end());
      }
      pass.clear();
      for (size_t r = kRequests; r-- > 0;)
        if (left[r] > 0) {
          pass.emplace_back(r, 1);
          --left[r];
        }
      if (pass.empty()) return logits;
      tokens = static_cast<std::int64_t>(pass.size());
    }
  }
  double off() const { return distance_.off(); }

  // The bytes of the logits and of every state after a packed run.
  std::vector<std::byte> bits(bool replay) {
    restart();
    decoder_.replay(replay);
    const std::vector<float> logits = packed([](std::int64_t n) { return n / 2; });
    const auto* first = reinterpret_cast<const std::byte*>(logits.data());
    std::vector<std::byte> all(first, first + logits.size() * sizeof(float));
    for (std::int64_t layer = 0; layer < layers_; ++layer) {
      const SequenceStates& s = decoder_.pool().layer(layer);
      for (const View& v : {s.conv, s.recurrent, s.keys, s.values}) {
        const Bytes bytes = v.rows * v.cols * size_of(v.dtype);
        if (!v) continue;
        all.resize(all.size() + static_cast<size_t>(bytes));
        device_.to_host(all.data() + all.size() - bytes, v.data, bytes);
      }
    }
    return all;
  }

private:
  // Slots are not in the order of the requests.
  static std::int64_t slot(size_t request) { return static_cast<std::int64_t>((3 * request + 1) % kRequests); }

  const Expected& expected_;
  Distance distance_;
  size_t vocab_;
  std::int64_t layers_;
  Device& device_;
  Decoder decoder_;
};

std::vector<std::int64_t> splits_of(std::int64_t length) {
  std::set<std::int64_t> at{0, 1, length / 2, length - 1, length};
  for (std::int64_t edge : {63, 64, 65})
    if (edge < length) at.insert(edge);
  return {at.begin(), at.end()};
}

} // namespace

config::Run decode_check_run(config::Run run, DType dtype) {
  run.parallel = {};
  run.micro_batch = run.global_batch = 1;
  run.seq = std::accumulate(std::begin(kDecodeLengths), std::end(kDecodeLengths), std::int64_t{0});
  run.dtype = dtype;
  run.settings.packed = true;
  run.max_documents.reset();
  run.vocab_divisor = 0;
  run.train_mtp = false;
  run.vision = config::VisionMode::Absent;
  run.cross_entropy = config::CrossEntropy::FusedNative; // the one form whose logits exist in every stack
  return run;
}

std::vector<DecodeCase> check_decode(Session& session) {
  const Expected expected = expected_of(session);
  const std::string all = fmt::format("{}", fmt::join(kDecodeLengths, " + "));
  std::vector<DecodeCase> cases;
  if (expected.by_norm) {
    Distance full(expected);
    full.add(full_forward(session, expected.batch), 0);
    cases.push_back({all, "full forward", full.off(), expected.allowed});
  }
  Run run(session, expected);
  auto done = [&](std::string lengths, std::string split) { cases.push_back({std::move(lengths), std::move(split), run.off(), expected.allowed}); };

  for (size_t r = 0; r < kRequests; ++r) {
    const std::int64_t length = kDecodeLengths[r];
    for (std::int64_t prefill : splits_of(length)) {
      run.restart();
      if (prefill > 0) run.append({{r, prefill}});
      for (std::int64_t t = prefill; t < length; ++t) run.append({{r, 1}});
      done(fmt::format("{}", length), fmt::format("prefill {}, decode {}", prefill, length - prefill));
    }
    if (length < 4) continue;
    run.restart(); // a prompt in three pieces
    const std::int64_t piece = length / 3;
    for (std::int64_t n : {piece, piece, length - 2 * piece}) run.append({{r, n}});
    done(fmt::format("{}", length), fmt::format("prefill {} + {} + {}", piece, piece, length - 2 * piece));
  }

  auto packed = [&](const std::string& name, const std::function<std::int64_t(std::int64_t)>& prefill) {
    run.restart();
    run.packed(prefill);
    done(all, name);
  };
  packed("prefill all", [](std::int64_t n) { return n; });
  packed("prefill half, decode half", [](std::int64_t n) { return n / 2; });
  packed("prefill all but one, decode one", [](std::int64_t n) { return n - 1; });
  packed("prefill at most 64, decode the rest", [](std::int64_t n) { return std::min<std::int64_t>(n, 64); });
  packed("decode all", [](std::int64_t) { return std::int64_t{0}; });
  if (run.decoder().replays()) {
    const std::vector<std::byte> replayed = run.bits(true), launched = run.bits(false);
    cases.push_back({all, "replayed or launched: other bits", replayed == launched ? 0.0 : 1.0, 0});
  }
  return cases;
}

} // namespace gdn::trainer
