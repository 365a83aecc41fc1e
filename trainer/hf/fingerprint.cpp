#include "trainer/hf/fingerprint.h"

#include <algorithm>

#include <fmt/core.h>

#include "reference/random.h"
#include "trainer/mapped_file.h"

namespace gdn::trainer::hf {

namespace fs = std::filesystem;

std::vector<Fingerprint> fingerprints(const Trace& trace) {
  std::vector<Fingerprint> out;
  auto add = [&](std::string name, const std::vector<float>& values) {
    if (values.empty()) return;
    double squares = 0;
    for (double x : values) squares += x * x;
    out.push_back({std::move(name), squares / static_cast<double>(values.size()),
                   reference::stream_id(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))});
  };
  for (size_t i = 0; i < trace.hidden.size(); ++i) add(fmt::format("hidden.{}", i), trace.hidden[i]);
  add("after the final norm", trace.normed);
  add("logits", trace.logits);
  add("loss", {static_cast<float>(trace.result.loss)});
  return out;
}

Batch drawn_tokens(std::int64_t seq, std::int64_t vocab, std::uint64_t seed) {
  const reference::RandomStream random{.seed = seed};
  Batch b;
  auto id = [&](std::int64_t t) { return static_cast<std::int64_t>(random.bits(static_cast<std::uint64_t>(t)) % static_cast<std::uint64_t>(vocab)); };
  for (std::int64_t t = 0; t < seq; ++t) {
    b.ids.push_back(id(t));
    b.labels.push_back(id(t + 1));
  }
  b.sequences = dense_sequences(1, seq);
  return b;
}

std::string first_difference(const fs::path& a, const fs::path& b) {
  std::vector<fs::path> names;
  for (const fs::directory_entry& e : fs::directory_iterator(a))
    if (e.path().extension() == ".safetensors" && fs::exists(b / e.path().filename())) names.push_back(e.path().filename());
  std::sort(names.begin(), names.end());
  for (const fs::path& name : names) {
    const MappedFile x(a / name), y(b / name);
    if (x.content().size() != y.content().size() || !std::equal(x.content().begin(), x.content().end(), y.content().begin())) return name.string();
  }
  return "";
}

} // namespace gdn::trainer::hf
