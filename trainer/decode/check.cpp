#include "trainer/decode/check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "reference/random.h"
#include "trainer/decode/decoder.h"

namespace gdn::trainer {

namespace {

constexpr size_t kRequests = std::size(kDecodeLengths);

struct Full { // of all requests together
  std::vector<std::int64_t> ids, offsets{0};
  std::vector<float> logits; // [tokens, vocab]
  double largest = 0;
};

Full full_forward(Session& session) {
  Full f;
  Batch batch;
  const std::int64_t vocab = session.model().vocab;
  const reference::RandomStream random{.seed = 1234};
  for (std::int64_t length : kDecodeLengths) f.offsets.push_back(f.offsets.back() + length);
  for (std::int64_t t = 0; t < f.offsets.back(); ++t)
    f.ids.push_back(static_cast<std::int64_t>(random.bits(static_cast<std::uint64_t>(t)) % static_cast<std::uint64_t>(vocab)));
  batch.ids = batch.labels = f.ids;
  batch.sequences = f.offsets;
  const std::vector<float> padded = run_traced(session, batch).logits;
  const size_t columns = padded.size() / f.ids.size();
  for (size_t t = 0; t < f.ids.size(); ++t)
    f.logits.insert(f.logits.end(), padded.begin() + static_cast<std::ptrdiff_t>(t * columns),
                    padded.begin() + static_cast<std::ptrdiff_t>(t * columns) + vocab);
  for (float x : f.logits) f.largest = std::max(f.largest, std::abs(static_cast<double>(x)));
  return f;
}

// Feeds requests into a decoder and compares what comes out.
class Run {
public:
  Run(Session& session, const Full& full)
      : full_(full), vocab_(static_cast<size_t>(session.model().vocab)),
        decoder_(session.model(), session.run_settings(), session.device(), session.parameters(), kRequests, *std::max_element(std::begin(kDecodeLengths), std::end(kDecodeLengths))) {}

  void restart() {
    off_ = 0;
    for (size_t r = 0; r < kRequests; ++r) decoder_.pool().reset(slot(r));
  }
  // Appends so many tokens to each of the requests, in one pass.
  void append(const std::vector<std::pair<size_t, std::int64_t>>& counts) {
    std::vector<NewTokens> requests;
    std::vector<size_t> rows; // of the full forward
    for (const auto& [r, count] : counts) {
      NewTokens n{slot(r), {}};
      const std::int64_t first = full_.offsets[r] + decoder_.pool().length(slot(r));
      for (std::int64_t t = first; t < first + count; ++t) {
        n.ids.push_back(full_.ids[static_cast<size_t>(t)]);
        rows.push_back(static_cast<size_t>(t));
      }
      requests.push_back(std::move(n));
    }
    const std::vector<float> logits = decoder_.append(requests);
    for (size_t i = 0; i < rows.size(); ++i)
      for (size_t c = 0; c < vocab_; ++c) {
        const double d = std::abs(static_cast<double>(logits[i * vocab_ + c]) - full_.logits[rows[i] * vocab_ + c]) / full_.largest;
        if (!(d <= off_) && !std::isnan(off_)) off_ = d; // NaN stays
      }
  }
  double off() const { return off_; }

private:
  // Slots are not in the order of the requests.
  static std::int64_t slot(size_t request) { return static_cast<std::int64_t>((3 * request + 1) % kRequests); }

  const Full& full_;
  size_t vocab_;
  Decoder decoder_;
  double off_ = 0;
};

std::vector<std::int64_t> splits_of(std::int64_t length) {
  std::set<std::int64_t> at{0, 1, length / 2, length - 1, length};
  for (std::int64_t edge : {63, 64, 65})
    if (edge < length) at.insert(edge);
  return {at.begin(), at.end()};
}

} // namespace

config::Run decode_check_run(config::Run run) {
  run.parallel = {};
  run.micro_batch = run.global_batch = 1;
  run.seq = std::accumulate(std::begin(kDecodeLengths), std::end(kDecodeLengths), std::int64_t{0});
  run.dtype = DType::FP32;
  run.vocab_divisor = 0;
  run.train_mtp = false;
  run.vision = config::VisionMode::Absent;
  run.cross_entropy = config::CrossEntropy::FusedNative; // the one form whose logits exist in every stack
  return run;
}

std::vector<DecodeCase> check_decode(Session& session) {
  const Full full = full_forward(session);
  Run run(session, full);
  std::vector<DecodeCase> cases;
  auto done = [&](std::string lengths, std::string split) { cases.push_back({std::move(lengths), std::move(split), run.off(), kDecodeTolerance}); };

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

  const std::string all = fmt::format("{}", fmt::join(kDecodeLengths, " + "));
  auto packed = [&](const std::string& name, const std::function<std::int64_t(std::int64_t)>& prefill) {
    run.restart();
    std::vector<std::int64_t> left(std::begin(kDecodeLengths), std::end(kDecodeLengths));
    std::vector<std::pair<size_t, std::int64_t>> pass;
    std::int64_t tokens = 0;
    for (size_t r = 0; r < kRequests; ++r) {
      pass.emplace_back(r, prefill(left[r])); // none is legal: an empty request changes nothing
      left[r] -= pass.back().second;
      tokens += pass.back().second;
    }
    if (tokens > 0) run.append(pass);
    while (true) { // one token of every request that has one left; the others drop out
      pass.clear();
      for (size_t r = kRequests; r-- > 0;)
        if (left[r] > 0) {
          pass.emplace_back(r, 1);
          --left[r];
        }
      if (pass.empty()) break;
      run.append(pass);
    }
    done(all, name);
  };
  packed("prefill all", [](std::int64_t n) { return n; });
  packed("prefill half, decode half", [](std::int64_t n) { return n / 2; });
  packed("prefill all but one, decode one", [](std::int64_t n) { return n - 1; });
  packed("prefill at most 64, decode the rest", [](std::int64_t n) { return std::min<std::int64_t>(n, 64); });
  packed("decode all", [](std::int64_t) { return std::int64_t{0}; });
  return cases;
}

} // namespace gdn::trainer
