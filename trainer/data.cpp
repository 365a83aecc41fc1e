#include "trainer/data.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include <fmt/core.h>

#include "core/error.h"
#include "core/units.h"
#include "model/dims.h"
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

// Documents one after the other, the first drawn from the seed, until the row is full.
class Documents final : public Tokens {
public:
  Documents(std::vector<std::int32_t> tokens, std::vector<size_t> ends, std::string what, std::uint64_t seed)
      : tokens_(std::move(tokens)), ends_(std::move(ends)), what_(std::move(what)), seed_(seed) {}
  std::string describe() const override { return what_; }
  Batch batch(std::uint64_t step, std::uint64_t index, std::int64_t sequences, std::int64_t seq) const override {
    const reference::RandomStream random{.seed = seed_, .step = step, .micro_batch = index};
    const auto row = static_cast<size_t>(sequences * seq);
    Batch b;
    b.sequences.push_back(0);
    for (size_t d = random.bits(0) % ends_.size(); b.ids.size() < row; d = (d + 1) % ends_.size()) {
      const size_t first = d == 0 ? 0 : ends_[d - 1], n = std::min(ends_[d] - first, row - b.ids.size());
      for (size_t t = 0; t < n; ++t) {
        b.ids.push_back(tokens_[first + t]);
        b.labels.push_back(first + t + 1 < ends_[d] ? tokens_[first + t + 1] : kIgnored);
      }
      b.sequences.push_back(static_cast<std::int64_t>(b.ids.size()));
    }
    return b;
  }

  std::int64_t most_documents(std::int64_t tokens) const override {
    const size_t count = ends_.size(), all = ends_.back(), row = static_cast<size_t>(tokens), rest = row % all;
    auto begin = [&](size_t d) { return d / count * all + (d % count == 0 ? 0 : ends_[d % count - 1]); }; // going round
    size_t most = 0;
    for (size_t first = 0, end = 0; first < count; ++first) {
      while (begin(end) < begin(first) + rest) ++end;
      most = std::max(most, end - first);
    }
    return static_cast<std::int64_t>(row / all * count + most);
  }

private:
  static constexpr std::int64_t kIgnored = -100;
  std::vector<std::int32_t> tokens_;
  std::vector<size_t> ends_; // of each document in tokens_, none of them empty
  std::string what_;
  std::uint64_t seed_;
};

// Synthetic documents of 1 to `seq` tokens. Their number is arbitrary: enough for rows to differ.
std::unique_ptr<Tokens> synthetic_documents(std::uint64_t seed, std::int64_t vocab, std::int64_t seq) {
  constexpr size_t kDocuments = 64;
  const reference::RandomStream lengths{.seed = seed, .op = 1}, ids{.seed = seed, .op = 2};
  std::vector<std::int32_t> tokens;
  std::vector<size_t> ends;
  for (std::uint64_t d = 0; d < kDocuments; ++d) {
    const std::uint64_t n = 1 + lengths.bits(d) % static_cast<std::uint64_t>(seq);
    for (std::uint64_t t = 0; t < n; ++t)
      tokens.push_back(static_cast<std::int32_t>(ids.bits(tokens.size()) % static_cast<std::uint64_t>(vocab)));
    ends.push_back(tokens.size());
  }
  return std::make_unique<Documents>(std::move(tokens), std::move(ends), fmt::format("synthetic documents of 1 to {} tokens, seed {}", seq, seed), seed);
}

// Paragraphs of a text, the blank lines between them left out.
std::vector<size_t> split_at_blank_lines(std::vector<std::int32_t>& text) {
  std::vector<std::int32_t> kept;
  std::vector<size_t> ends;
  for (size_t i = 0; i < text.size();) {
    if (text[i] == '\n' && (i + 1 == text.size() || text[i + 1] == '\n')) {
      while (i < text.size() && text[i] == '\n') ++i;
      if (kept.size() > (ends.empty() ? 0 : ends.back())) ends.push_back(kept.size());
      continue;
    }
    kept.push_back(text[i++]);
  }
  if (kept.size() > (ends.empty() ? 0 : ends.back())) ends.push_back(kept.size());
  text = std::move(kept);
  return ends;
}

std::vector<size_t> split_after(const std::vector<std::int32_t>& tokens, std::int64_t eod) {
  std::vector<size_t> ends;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] == eod || i + 1 == tokens.size()) ends.push_back(i + 1);
  return ends;
}

std::vector<char> read_file(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error))
    throw Error(ErrorCode::Config, fmt::format("train.data_path: '{}' is {}", path.string(), fs::exists(path, error) ? "no file" : "not there"),
                "a relative path starts at the configuration file");
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error(ErrorCode::Io, fmt::format("train.data_path: cannot read '{}'", path.string()));
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class T> std::vector<std::int32_t> decode(const std::vector<char>& raw, const fs::path& path, std::int64_t vocab, const char* hint) {
  if (raw.size() % sizeof(T) != 0)
    throw Error(ErrorCode::Config, fmt::format("{}: {} bytes are no whole number of {}-byte tokens", path.string(), raw.size(), sizeof(T)));
  std::vector<std::int32_t> out;
  for (size_t i = 0; i < raw.size(); i += sizeof(T)) {
    T value;
    std::memcpy(&value, raw.data() + i, sizeof(T));
    if (static_cast<std::int64_t>(value) >= vocab)
      throw Error(ErrorCode::Config, fmt::format("{}: token {} is {}, but the vocabulary ends at {}", path.string(), i / sizeof(T), value, vocab - 1), hint);
    out.push_back(static_cast<std::int32_t>(value));
  }
  return out;
}

} // namespace

std::unique_ptr<Tokens> open_tokens(const config::Train& train, const fs::path& folder, std::int64_t vocab, std::int64_t seq, bool packed) {
  if (train.data == "synthetic") {
    if (packed) return synthetic_documents(train.seed, vocab, seq);
    return std::make_unique<Synthetic>(train.seed, vocab);
  }
  const bool text = train.data == "text";
  if (packed && !text && train.eod_id < 0)
    throw Error(ErrorCode::Config, "packed = true: documents of data: tokens end with train.eod_id, which is not given", "--set train.eod_id=ID");
  const fs::path path = fs::path(train.data_path).is_absolute() ? fs::path(train.data_path) : folder / train.data_path;
  const std::vector<char> raw = read_file(path);
  const char* hint = text ? "bytes need vocab_size: 256" : "is train.data_dtype right?";
  std::vector<std::int32_t> tokens = text                           ? decode<unsigned char>(raw, path, vocab, hint)
                                     : train.data_dtype == "uint32" ? decode<std::uint32_t>(raw, path, vocab, hint)
                                                                    : decode<std::uint16_t>(raw, path, vocab, hint);
  const std::string size = format_count(static_cast<std::int64_t>(tokens.size()));
  std::string what = text ? fmt::format("text {}, {} bytes as tokens", train.data_path, size)
                          : fmt::format("tokens {}, {} {}", train.data_path, size, train.data_dtype);
  if (packed) {
    std::vector<size_t> ends = text ? split_at_blank_lines(tokens) : split_after(tokens, train.eod_id);
    if (ends.empty()) throw Error(ErrorCode::Config, fmt::format("{}: holds no document", path.string()));
    what += fmt::format(", {} documents", format_count(static_cast<std::int64_t>(ends.size())));
    return std::make_unique<Documents>(std::move(tokens), std::move(ends), std::move(what), train.seed);
  }
  if (static_cast<std::int64_t>(tokens.size()) < seq + 1)
    throw Error(ErrorCode::Config, fmt::format("{}: {} tokens, but one sequence needs {}", path.string(), tokens.size(), seq + 1));
  return std::make_unique<Windows>(std::move(tokens), std::move(what), train.seed);
}

std::unique_ptr<Tokens> open_tokens(const config::Train& train, const fs::path& folder, std::int64_t vocab, const config::Run& run) {
  auto source = open_tokens(train, folder, vocab, run.seq, run.settings.packed);
  const std::int64_t tokens = run.micro_batch * run.seq, most = source->most_documents(tokens), bound = model::most_sequences(run);
  if (most > bound)
    throw Error(ErrorCode::Config,
                fmt::format("packed = true: a micro-batch of {} tokens can have {} documents ({}), max_documents is {}{}", format_count(tokens),
                            format_count(most), source->describe(), format_count(bound), run.max_documents ? "" : " where it is not given"),
                fmt::format("--set max_documents={} makes room for them, in the scratch of the kernels", most));
  return source;
}

std::vector<Batch> step_batches(const Tokens& tokens, const config::Run& run, std::uint64_t step, std::int64_t data_rank) {
  std::vector<Batch> out;
  for (std::int64_t m = 0; m < run.micro_batches(); ++m)
    out.push_back(tokens.batch(step, static_cast<std::uint64_t>(m * run.parallel.dp() + data_rank), run.micro_batch, run.seq));
  return out;
}

} // namespace gdn::trainer
