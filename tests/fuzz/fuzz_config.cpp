// Mutation fuzzer of everything that reads text from outside: YAML profiles and run files, Hugging
// Face config.json, Megatron-LM arguments. An input must be read or refused with Error{Config};
// anything else (another exception, a crash, seconds of work) is a finding and is printed.
//
//   fuzz_config [--iterations N | --seconds N] [--seed N]
//
// Build it with -Db_sanitize=address,undefined for a real hunt; the test run does a short one.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "config/embedded.h"
#include "config/hardware_io.h"
#include "config/import.h"
#include "config/json.h"
#include "config/model_io.h"
#include "config/profiles.h"
#include "config/run_io.h"
#include "config/yaml.h"
#include "core/error.h"

using namespace gdn;
using namespace gdn::config;

namespace {

using Clock = std::chrono::steady_clock;

const char* const kJson = R"({"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "text_config": {
 "attention_bias": false, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "layer_types":
 ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
 "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
 "mlp_only_layers": [], "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "num_attention_heads": 16,
 "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
 "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
 "shared_expert_intermediate_size": 512, "vocab_size": 248320},
 "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 2048}})";

const char* const kOlmoJson = R"({"model_type": "olmo_hybrid", "hidden_size": 3840, "num_hidden_layers": 32, "vocab_size": 100352,
 "num_attention_heads": 30, "intermediate_size": 11008, "rms_norm_eps": 1e-06, "rope_parameters": null, "layer_types": null})";

const char* const kArguments = R"(ARGS=( --num-layers 48 --hidden-size 2048 # comment
 --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256 --vocab-size 151936 \
 --linear-attention-freq '([1]*3+[0]*1)*12' --moe-layer-freq "[0]*1+[1]*47" --num-experts 512 --moe-router-topk 10
 --moe-ffn-hidden-size 512 --swiglu --disable-bias-linear --lr 1e-4 --data-path "$DATA" )
torchrun --nproc_per_node 8 --nnodes=16 pretrain_gpt.py --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4
 --pipeline-model-parallel-layout "Et*12|(t|)*36mL" --expert-model-parallel-size 32 --recompute-granularity selective
 --recompute-modules moe_act shared_experts layernorm --bf16 --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 ${A[@]})";

// Inputs that are known to be hard on readers.
std::vector<std::string> hard_inputs() {
  std::vector<std::string> out{
      "", "\n", "---\n---\n", "...", "%YAML 9.9\n---\na: 1", "a: &a [*a]", "a: &a 1\nb: *a", "? ? ? ? ?", "- - - - -", "{{{{", "[[[[",
      "a: |\n", "a: >+9\n x", "\"\\x", "'", "\"\\u12", "!", "!<", "!!binary x", "&", "*", "@", "`", "a:\tb", "\xEF\xBB\xBFname: x",
      "{\"a\": }", "{\"a\"", "[1,", "\"\\ud800\"", "-", "--", "--=", "--a=", "--micro-batch-size=", "'\\", "\"\\", "$", "((((", "--x (",
      "name: [[[[[[[[]]]]]]]]", "run: {settings: {settings: 1}}", "run: []", "vision_config: 3", "efficiencies: {a: b}", "2024-01-01: x"};
  out.push_back("a: [" + std::string(3000, '[') + std::string(3000, ']') + "]");
  out.push_back(std::string(3000, '{') + std::string(3000, '}'));
  out.push_back(std::string(100000, '['));
  out.push_back(std::string(100000, '{'));
  out.push_back(std::string(100000, '-'));
  out.push_back(std::string(100000, '"'));
  std::string deep_lists, keys, colons;
  for (int i = 0; i < 20000; ++i) deep_lists += "- ";
  for (int i = 0; i < 19000; ++i) keys += fmt::format("k{}: 1\n", i);
  for (int i = 0; i < 20000; ++i) colons += "? ";
  out.insert(out.end(), {deep_lists, keys, colons, "a: " + std::string(250000, 'x'), std::string(250000, '#'),
                         std::string(250000, '\n') + "a: 1", "--pipeline-model-parallel-layout ((((((((t*4096)*4096)*4096"});
  return out;
}

std::vector<std::string> seeds() {
  std::vector<std::string> out;
  for (const EmbeddedFile& f : embedded_models()) out.emplace_back(f.text);
  for (const EmbeddedFile& f : embedded_hardware()) out.emplace_back(f.text);
  out.push_back(to_yaml(to_node(Run{})));
  for (int i = 0; i < 6; ++i) out.insert(out.end(), {kJson, kOlmoJson, kArguments}); // as often as the profiles
  return out;
}

const std::vector<std::string> kTokens{
    ": ", "\n", "- ", "[", "]", "{", "}", ",", "\"", "'", "#", "&a ", "*a", "!!str ", "|", ">", "? ", "---\n", "\t", "\\", "\\\n", "$X", "--",
    "=", "*", "null", "~", "true", "yes", "0", "-1", "010", "1e3", "1e999", "nan", "0x10", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "4294967296", "65536", "0.0", "1e-320", "\xff", "\xc3\xa9", std::string(1, '\0'),
    "name: ", "run:\n  ", "layer_types: ", "full_attention", "settings", "*4096", "(t|)*", "\"model_type\": ", "--num-layers "};

class Mutator {
public:
  explicit Mutator(std::uint64_t seed) : random_(seed), seeds_(seeds()) {}

  std::string next() {
    std::string text = seeds_[below(seeds_.size())];
    for (std::size_t n = 1 + below(6); n > 0; --n) mutate(text);
    return text.substr(0, 1 << 17);
  }

private:
  std::size_t below(std::size_t n) { return n == 0 ? 0 : random_() % n; }
  void mutate(std::string& t) {
    std::size_t at = below(t.size() + 1), length = std::min(t.size() - at, 1 + below(40));
    switch (below(9)) {
    case 0: if (at < t.size()) t[at] = static_cast<char>(random_()); break;
    case 1: t.insert(at, kTokens[below(kTokens.size())]); break;
    case 2: t.erase(at, length); break;
    case 3: t.insert(below(t.size() + 1), t.substr(at, length)); break;
    case 4: t.replace(at, length, kTokens[below(kTokens.size())]); break;
    case 5: { // a piece of another seed
      const std::string& other = seeds_[below(seeds_.size())];
      t.insert(at, other.substr(below(other.size()), 1 + below(200)));
      break;
    }
    case 6: { // a number becomes another one
      std::size_t digit = t.find_first_of("0123456789", at);
      if (digit == std::string::npos) break;
      std::size_t end = t.find_first_not_of("0123456789.", digit);
      t.replace(digit, (end == std::string::npos ? t.size() : end) - digit, kTokens[below(kTokens.size())]);
      break;
    }
    case 7: { // repeat a piece
      std::string piece = t.substr(at, length), many;
      for (std::size_t n = below(200); n > 0; --n) many += piece;
      t.insert(at, many);
      break;
    }
    case 8: { // drop or double a line
      std::size_t begin = t.rfind('\n', at), end = t.find('\n', at);
      begin = begin == std::string::npos ? 0 : begin + 1;
      end = end == std::string::npos ? t.size() : end + 1;
      if (begin >= end) break;
      std::string line = t.substr(begin, end - begin);
      if (below(2)) t.erase(begin, end - begin);
      else t.insert(begin, line);
      break;
    }
    }
  }

  std::mt19937_64 random_;
  std::vector<std::string> seeds_;
};

struct Counts {
  long inputs = 0, read = 0, refused = 0;
};

// Runs one reader; false if it did what no reader may do.
template <typename F> bool guarded(const char* reader, const std::string& input, Counts& counts, F&& read) {
  std::clock_t begin = std::clock(); // of the processor: a busy machine is no finding
  std::string finding;
  try {
    read();
    ++counts.read;
  } catch (const Error& e) {
    ++counts.refused;
    if (e.code() != ErrorCode::Config) finding = fmt::format("Error of another kind: {}", e.what());
    if (std::string(e.what()).empty()) finding = "an empty message";
  } catch (const std::exception& e) {
    finding = fmt::format("{}: {}", typeid(e).name(), e.what());
  }
  double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  if (finding.empty() && seconds > 10) finding = fmt::format("took {:.1f} s", seconds);
  if (finding.empty()) return true;
  fmt::print(stderr, "FINDING in {}: {}\n--- input, {} bytes\n{}\n---\n", reader, finding, input.size(), input.substr(0, 1500));
  return false;
}

// What was read must be writable and read back to the same text.
template <typename Value, typename Read> void round_trip(const Value& value, Read&& read) {
  std::string text = to_yaml(to_node(value));
  if (to_yaml(to_node(read(parse_yaml(text, "again")))) != text) throw std::logic_error("the echo reads back differently:\n" + text);
}

bool try_all(const std::string& input, Counts& counts) {
  ++counts.inputs;
  bool ok = guarded("model profile", input, counts, [&] {
    ModelProfile p = read_model_profile(parse_yaml(input, "fuzz.yaml"));
    round_trip(p, [](const Node& n) { return read_model_profile(n); });
  });
  ok &= guarded("hardware profile", input, counts, [&] {
    Hardware h = read_hardware(parse_yaml(input, "fuzz.yaml"));
    parse_yaml(to_yaml(to_node(h)), "again");
  });
  ok &= guarded("run", input, counts, [&] {
    Run run;
    apply(run, parse_yaml(input, "fuzz.yaml"));
    round_trip(run, [](const Node& n) {
      Run again;
      apply(again, n);
      return again;
    });
  });
  ok &= guarded("config.json", input, counts, [&] {
    std::vector<std::string> notes;
    Model m = read_model(model_from_hugging_face(parse_json(input, "fuzz.json"), "fuzz", notes));
    round_trip(m, read_model);
  });
  ok &= guarded("arguments", input, counts, [&] {
    MegatronArguments args = read_megatron_arguments(input, "fuzz.sh");
    Run run;
    for (const Setting& s : args.run) apply(run, s.key, s.value, s.where);
    if (args.model.kind != Node::Kind::Null) resolve_layout(run, read_model(args.model).layers());
  });
  return ok;
}

} // namespace

int main(int argc, char** argv) {
  long iterations = 2000;
  double seconds = 0;
  std::uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string option = argv[i];
    if (option == "--iterations") iterations = std::atol(argv[i + 1]);
    else if (option == "--seconds") seconds = std::atof(argv[i + 1]);
    else if (option == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
    else return fmt::print(stderr, "unknown option {}\n", option), 2;
  }
  Counts counts;
  bool ok = true;
  for (const std::string& input : hard_inputs()) ok &= try_all(input, counts);
  for (const std::string& input : seeds()) ok &= try_all(input, counts);
  long read_whole = counts.read;
  Mutator mutator(seed);
  auto begin = Clock::now();
  auto more = [&](long i) {
    return seconds > 0 ? std::chrono::duration<double>(Clock::now() - begin).count() < seconds : i < iterations;
  };
  for (long i = 0; ok && more(i); ++i) ok &= try_all(mutator.next(), counts);
  fmt::print("{} inputs, {} read, {} refused, {}\n", counts.inputs, counts.read, counts.refused, ok ? "no finding" : "FINDING");
  // A fuzzer that reads nothing tests only the first line of each reader.
  if (read_whole < 40 || counts.read == read_whole) return fmt::print(stderr, "nothing was read\n"), 1;
  return ok ? 0 : 1;
}
