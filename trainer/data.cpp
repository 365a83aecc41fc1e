#include "trainer/data.h"

#include <cstring>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "core/error.h"
#include "core/units.h"
#include "reference/random.h"

namespace gdn::trainer {

namespace fs = std::filesystem;

namespace {

// Uniform ids: nothing to learn beyond the frequencies, everything to measure.
class Synthetic final : public Tokens {
public:
  Synthetic(std::uint64_t seed, std::int64_t vocab) : seed_(seed), vocab_(vocab) {}
  std::string describe() const override { return fmt::format("synthetic tokens, seed {}", seed_); }
  Batch batch(std::uint64_t step, std::uint64_t index, std::int64_t sequences, std::int64_t seq) const override {
    const reference::RandomStream random{.seed = seed_, .step = step, .micro_batch = index};
    Batch b;
    for (std::int64_t s = 0; s < sequences; ++s)
      for (std::int64_t t = 0; t < seq; ++t) {
        const auto at = static_cast<std::uint64_t>(s * (seq + 1) + t);
        b.ids.push_back(id(random, at));
        b.labels.push_back(id(random, at + 1));
      }
    b.sequences = dense_sequences(sequences, seq);
    return b;
  }

private:
  std::int64_t id(const reference::RandomStream& random, std::uint64_t at) const {
    return static_cast<std::int64_t>(random.bits(at) % static_cast<std::uint64_t>(vocab_));
  }
  std::uint64_t seed_;
  std::int64_t vocab_;
};

// Windows of a token sequence, their starts drawn from the seed.
class Windows final : public Tokens {
public:
  Windows(std::vector<std::int32_t> tokens, std::string what, std::uint64_t seed)
      : tokens_(std::move(tokens)), what_(std::move(what)), seed_(seed) {}
  std::string describe() const override { return what_; }
  Batch batch(std::uint64_t step, std::uint64_t index, std::int64_t sequences, std::int64_t seq) const override {
    const reference::RandomStream random{.seed = seed_, .step = step, .micro_batch = index};
    const auto starts = tokens_.size() - static_cast<size_t>(seq);
    Batch b;
    for (std::int64_t s = 0; s < sequences; ++s) {
      const size_t first = random.bits(static_cast<std::uint64_t>(s)) % starts;
      for (size_t t = first; t < first + static_cast<size_t>(seq); ++t) {
        b.ids.push_back(tokens_[t]);
        b.labels.push_back(tokens_[t + 1]);
      }
    }
    b.sequences = dense_sequences(sequences, seq);
    return b;
  }

private:
  std::vector<std::int32_t> tokens_;
  std::string what_;
  std::uint64_t seed_;
};

std::vector<char> read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || fs::is_directory(path))
    throw Error(ErrorCode::Io, fmt::format("train.data_path: cannot read '{}'", path.string()),
                "a relative path starts at the configuration file");
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class T> std::vector<std::int32_t> decode(const std::vector<char>& raw, const fs::path& path) {
  if (raw.size() % sizeof(T) != 0)
    throw Error(ErrorCode::Config, fmt::format("{}: {} bytes are no whole number of {}-byte tokens", path.string(), raw.size(), sizeof(T)));
  std::vector<std::int32_t> out;
  for (size_t i = 0; i < raw.size(); i += sizeof(T)) {
    T value;
    std::memcpy(&value, raw.data() + i, sizeof(T));
    out.push_back(static_cast<std::int32_t>(value));
  }
  return out;
}

} // namespace

std::unique_ptr<Tokens> open_tokens(const config::Train& train, const fs::path& folder, std::int64_t vocab, std::int64_t seq) {
  if (train.data == "synthetic") return std::make_unique<Synthetic>(train.seed, vocab);
  const fs::path path = fs::path(train.data_path).is_absolute() ? fs::path(train.data_path) : folder / train.data_path;
  const std::vector<char> raw = read_file(path);
  const bool text = train.data == "text";
  std::vector<std::int32_t> tokens = text                            ? decode<unsigned char>(raw, path)
                                     : train.data_dtype == "uint32" ? decode<std::uint32_t>(raw, path)
                                                                    : decode<std::uint16_t>(raw, path);
  if (static_cast<std::int64_t>(tokens.size()) < seq + 1)
    throw Error(ErrorCode::Config, fmt::format("{}: {} tokens, but one sequence needs {}", path.string(), tokens.size(), seq + 1));
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      throw Error(ErrorCode::Config, fmt::format("{}: token {} is {}, but the vocabulary ends at {}", path.string(), i, tokens[i], vocab - 1),
                  text ? "bytes need vocab_size: 256" : "is data_dtype right?");
  std::string what = text ? fmt::format("text {}, {} bytes as tokens", train.data_path, format_count(static_cast<std::int64_t>(tokens.size())))
                          : fmt::format("tokens {}, {} {}", train.data_path, format_count(static_cast<std::int64_t>(tokens.size())), train.data_dtype);
  return std::make_unique<Windows>(std::move(tokens), std::move(what), train.seed);
}

std::vector<Batch> step_batches(const Tokens& tokens, const config::Run& run, std::uint64_t step) {
  std::vector<Batch> out;
  for (std::int64_t m = 0; m < run.micro_batches(); ++m)
    out.push_back(tokens.batch(step, static_cast<std::uint64_t>(m), run.micro_batch, run.seq));
  return out;
}

} // namespace gdn::trainer
