#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// One value read from a file or an option, whatever the format: it knows where it stands, so every
// message can say file:line:column and the key. YAML, JSON and `--set` all end up here; the rest of
// the programs never sees the libraries behind them.
namespace gdn::config {

struct Entry;

struct Node {
  enum class Kind { Null, Scalar, List, Map };

  Kind kind = Kind::Null;
  std::string text = {};            // Scalar: as written, quotes and escapes resolved
  bool quoted = false;              // Scalar: written as a string, whatever it looks like
  std::string where = {};           // "run.yaml:3:7", "--set"
  std::string path = {};            // "run.recompute_modules[1]"; empty for the document
  std::vector<Node> items = {};     // List
  std::vector<Entry> entries = {};  // Map, in file order, keys unique

  static Node scalar(std::string text, std::string where = {}, std::string path = {});

  const Node* find(std::string_view key) const; // nullptr: absent, or not a map
  Node& set(std::string key, Node value);       // adds or replaces a map entry; keeps the order
  void erase(std::string_view key);

  // "run.yaml:3:7: run.pp: " — how every message about this node begins.
  std::string prefix() const;
  // Throws Error{Config}: prefix + message.
  [[noreturn]] void fail(const std::string& message, const std::string& hint = {}) const;
};

struct Entry {
  std::string key;
  std::string where; // of the key
  Node value;
};

// Conversions. Each throws Error{Config} at the node's position saying what was expected, what was
// found and what is allowed. Integers are plain decimal digits: "010" (octal elsewhere), "1e3" and
// "0x10" are errors, never a surprise. Booleans are true or false only.
std::int64_t as_int(const Node& node, std::int64_t lowest = 0,
                    std::int64_t highest = std::numeric_limits<std::int64_t>::max());
double as_double(const Node& node, double lowest, double highest);
bool as_bool(const Node& node);
std::string as_string(const Node& node);
// One of `allowed`, with the nearest spelling in the message.
std::string as_choice(const Node& node, const std::vector<std::string>& allowed);
// A list, or a scalar such as "a, b" or "[a, b]" (the form of options and of Megatron arguments).
std::vector<std::string> as_strings(const Node& node);
std::vector<std::int64_t> as_ints(const Node& node, std::int64_t lowest, std::int64_t highest);
// null, ~, none, or nothing at all.
bool is_none(const Node& node);

// Reads the entries of a map by name and knows which names it was asked for, so that a misspelt key
// is an error that lists what is allowed. Problems of missing keys are reported after unknown ones:
// a misspelt key is usually both.
class Fields {
public:
  explicit Fields(const Node& map); // throws unless `map` is a map

  const Node* find(std::string_view key);    // optional
  const Node* require(std::string_view key); // nullptr if absent, and done() throws

  void read(std::string_view key, std::int64_t& out, std::int64_t lowest, std::int64_t highest);
  void read(std::string_view key, double& out, double lowest, double highest);
  void read(std::string_view key, bool& out);
  void read(std::string_view key, std::string& out);
  void need(std::string_view key, std::int64_t& out, std::int64_t lowest, std::int64_t highest);
  void need(std::string_view key, std::string& out);

  // Throws on the first key nobody asked for, else on the first missing one.
  void done() const;

private:
  const Node& map_;
  std::vector<std::string> known_ = {};
  std::vector<std::string> missing_ = {};
};

// The unknown-key error of a map, also used where keys come from a table.
[[noreturn]] void fail_unknown_key(const Entry& entry, const std::string& path,
                                   const std::vector<std::string>& allowed);

// For building a document to be written (see yaml.h): numbers in their shortest exact form.
Node number_node(std::int64_t value);
Node number_node(double value);
Node bool_node(bool value);
Node string_node(std::string value); // quoted on output if it could be read as something else
Node list_node(const std::vector<std::string>& values);
Node list_node(const std::vector<std::int64_t>& values);

} // namespace gdn::config
