#include "config/hardware_io.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::config {

namespace {

// "4.8 TB/s" with unit "B/s" -> 4.8e12. Prefixes are decimal, as link and arithmetic rates are
// quoted; "us", "ms" and "s" are the same rule with unit "s".
double quantity(const Node& node, std::string_view unit) {
  std::string text = as_string(node);
  auto fail = [&]() {
    node.fail(fmt::format("'{}' is not a quantity in {}", text.substr(0, 60), unit),
              fmt::format("write a number and a unit, such as '4.8 T{}' or '3 {}'", unit, unit));
  };
  double value = 0;
  const char* last = text.data() + text.size();
  auto [end, ec] = std::from_chars(text.data(), last, value);
  if (ec != std::errc{} || !std::isfinite(value) || value < 0) fail();
  std::string_view rest(end, static_cast<std::size_t>(last - end));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  if (!rest.ends_with(unit)) fail();
  rest.remove_suffix(unit.size());
  double scale = 1;
  if (rest == "u") scale = 1e-6;
  else if (rest == "m") scale = 1e-3;
  else if (rest == "k") scale = 1e3;
  else if (rest == "M") scale = 1e6;
  else if (rest == "G") scale = 1e9;
  else if (rest == "T") scale = 1e12;
  else if (rest == "P") scale = 1e15;
  else if (!rest.empty()) fail();
  return value * scale;
}

Bytes byte_size(const Node& node) {
  try {
    return parse_bytes(as_string(node), node.path);
  } catch (const Error& e) {
    throw Error(ErrorCode::Config, node.where.empty() ? e.what() : node.where + ": " + e.what(), e.hint());
  }
}

// {value: ..., source: ...}; the source line goes into hardware.sources under the figure's name.
const Node* figure(Fields& f, const char* name, Hardware& h, bool needed) {
  const Node* node = needed ? f.require(name) : f.find(name);
  if (!node) return nullptr;
  Fields parts(*node);
  const Node* value = parts.require("value");
  std::string source;
  parts.need("source", source);
  parts.done();
  if (source.empty()) node->fail("the source is empty");
  h.sources.push_back(fmt::format("{}: {}", name, source));
  return value;
}

void read_quantity(Fields& f, const char* name, std::string_view unit, double& out, Hardware& h, bool needed) {
  if (const Node* v = figure(f, name, h, needed)) out = quantity(*v, unit);
}

const Node& list_of(const Node& node) {
  if (node.kind != Node::Kind::List) node.fail("expected a list");
  return node;
}

std::string word(const Node& node) {
  std::string text = as_string(node);
  for (char c : text)
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_')) node.fail("expected a lower-case name");
  if (text.empty()) node.fail("expected a lower-case name");
  return text;
}

const std::vector<std::string> kProviders{"upstream", "own", "cpu"};

EfficiencyRow read_efficiency(const Node& node) {
  EfficiencyRow row;
  Fields f(node);
  if (const Node* n = f.require("provider")) row.provider = as_choice(*n, kProviders);
  if (const Node* n = f.require("family")) row.family = as_choice(*n, efficiency_families());
  if (const Node* n = f.find("op")) row.op = as_choice(*n, efficiency_ops());
  if (const Node* n = f.require("pass"))
    row.pass = as_choice(*n, {"forward", "backward", "dgrad", "wgrad", "any"});
  if (const Node* n = f.find("size"); n && !is_none(*n)) row.size = as_double(*n, 1e-300, 1e300);
  if (const Node* n = f.require("value")) {
    row.value = as_double(*n, 0, 1);
    if (row.value == 0) n->fail("an efficiency is above 0 and at most 1");
  }
  f.need("source", row.source);
  f.done();
  return row;
}

CollectiveRow read_collective(const Node& node) {
  CollectiveRow row;
  Fields f(node);
  if (const Node* n = f.require("kind"))
    row.kind = as_choice(*n, {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"});
  if (const Node* n = f.find("provider")) row.provider = as_choice(*n, kProviders);
  if (const Node* n = f.find("link")) row.link = as_choice(*n, {"scale_up", "network"});
  if (const Node* n = f.require("share")) {
    row.share = as_double(*n, 0, 1);
    if (row.share == 0) n->fail("a share is above 0 and at most 1");
  }
  if (const Node* n = f.require("latency")) row.latency = quantity(*n, "s");
  f.need("source", row.source);
  f.done();
  return row;
}

ReserveRow read_reserve(const Node& node) {
  ReserveRow row;
  Fields f(node);
  if (const Node* n = f.require("name")) row.name = word(*n);
  if (const Node* n = f.find("per")) row.per = as_choice(*n, {"process", "communicator", "peer", "network", "allocator"});
  if (const Node* n = f.require("bytes")) row.bytes = byte_size(*n);
  f.read("channels", row.channels, 1, 1024);
  if (const Node* n = f.find("provider")) row.provider = as_choice(*n, kProviders);
  f.need("source", row.source);
  f.done();
  return row;
}

void refuse_repeated(const Hardware& h, const EfficiencyRow& row, const Node& node) {
  for (const EfficiencyRow& other : h.efficiencies)
    if (other.provider == row.provider && other.family == row.family && other.op == row.op && other.pass == row.pass &&
        other.size == row.size)
      node.fail(fmt::format("a second efficiency for {} {}{}{} {} at the same size", row.provider, row.family, row.op.empty() ? "" : " ", row.op, row.pass));
}

} // namespace

const std::vector<std::string>& efficiency_families() {
  static const std::vector<std::string> names{"gemm", "grouped_gemm", "attention", "rule", "conv", "norm", "elementwise", "permute", "router",
                                              "cross_entropy", "embedding", "optimizer"};
  return names;
}

const std::vector<std::string>& efficiency_ops() {
  static const std::vector<std::string> names{
      "data", "view", "copy", "residual_add", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "rms_norm", "linear", "conv_silu",
      "conv", "silu", "l2norm", "expand_heads", "gates", "rule", "gdn2_gates", "gdn2_rule", "gated_norm", "gdn_pre", "head_norm", "rope",
      "core_attention", "output_gate", "router", "permute", "dispatch", "expert_fc1", "expert_fc2", "swiglu_prob", "combine_dispatch",
      "unpermute", "swiglu", "shared_gate", "embedding", "concat", "lm_head", "cross_entropy", "linear_cross_entropy", "loss_sum", "gdn2_pre",
      "attention_pre", "top_k", "router_loss", "sort", "gather", "shared_score"};
  return names;
}

std::vector<ReserveRow> Hardware::reserve_of(std::string_view whose) const {
  auto is = [&](const ReserveRow& r) { return r.provider == whose; };
  std::vector<ReserveRow> rows;
  for (const ReserveRow& r : reserve)
    if (is(r) || (r.provider.empty() && std::none_of(reserve.begin(), reserve.end(), [&](const ReserveRow& o) { return is(o) && o.name == r.name; })))
      rows.push_back(r);
  return rows;
}

Hardware read_hardware(const Node& map) {
  Fields f(map);
  Hardware h;
  f.need("name", h.name);
  f.need("device_name", h.device_name);
  if (const Node* n = f.find("aliases")) h.aliases = as_strings(*n);
  if (const Node* n = f.require("sm")) h.sm = std::to_string(as_int(*n, 50, 999));
  if (const Node* n = figure(f, "memory", h, true)) h.memory = byte_size(*n);
  read_quantity(f, "bf16", "FLOP/s", h.bf16, h, true);
  read_quantity(f, "fp8", "FLOP/s", h.fp8, h, false);
  read_quantity(f, "fp4", "FLOP/s", h.fp4, h, false);
  if (const Node* n = figure(f, "fp8_relative", h, false)) h.fp8_relative = as_double(*n, 0.01, 2);
  read_quantity(f, "bandwidth", "B/s", h.bandwidth, h, true);
  read_quantity(f, "achieved_bandwidth", "B/s", h.achieved_bandwidth, h, true);
  read_quantity(f, "scale_up", "B/s", h.scale_up, h, false);
  if (const Node* n = figure(f, "scale_up_domain", h, false)) h.scale_up_domain = as_int(*n, 1, 4096);
  read_quantity(f, "network", "B/s", h.network, h, false);
  read_quantity(f, "host_link", "B/s", h.host_link, h, false);
  read_quantity(f, "host_memory", "B/s", h.host_memory, h, false);
  read_quantity(f, "launch_latency", "s", h.launch_latency, h, true);
  if (const Node* n = figure(f, "allocator_reserve", h, false)) h.allocator_reserve = as_double(*n, 0, 1);
  if (h.memory == 0 && map.find("memory")) map.find("memory")->fail("must be above 0");
  if (h.bf16 == 0 && map.find("bf16")) map.find("bf16")->fail("must be above 0");
  if (h.bandwidth == 0 && map.find("bandwidth")) map.find("bandwidth")->fail("must be above 0");
  if (h.achieved_bandwidth > h.bandwidth && map.find("achieved_bandwidth"))
    map.find("achieved_bandwidth")->fail("is above the nominal bandwidth");

  if (const Node* n = f.find("efficiencies"))
    for (const Node& item : list_of(*n).items) {
      EfficiencyRow row = read_efficiency(item);
      refuse_repeated(h, row, item);
      h.efficiencies.push_back(std::move(row));
    }
  if (const Node* n = f.find("collectives"))
    for (const Node& item : list_of(*n).items) {
      CollectiveRow row = read_collective(item);
      for (const CollectiveRow& o : h.collectives)
        if (o.provider == row.provider && o.kind == row.kind && o.link == row.link)
          item.fail(fmt::format("a second row for {}{}{} on link {}", row.provider, row.provider.empty() ? "" : " ", row.kind, row.link));
      h.collectives.push_back(std::move(row));
    }
  if (const Node* n = f.find("reserve"))
    for (const Node& item : list_of(*n).items) {
      ReserveRow row = read_reserve(item);
      for (const ReserveRow& o : h.reserve)
        if (o.provider == row.provider && o.name == row.name) item.fail(fmt::format("a second row '{}'{}{}", row.name, row.provider.empty() ? "" : " of provider ", row.provider));
      h.reserve.push_back(std::move(row));
    }
  f.done();
  return h;
}

Node to_node(const Hardware& h) {
  Node out;
  auto source_of = [&](const std::string& name) {
    for (const std::string& s : h.sources)
      if (s.starts_with(name + ": ")) return s.substr(name.size() + 2);
    return std::string();
  };
  auto figure_node = [&](const char* name, Node value) {
    std::string source = source_of(name);
    if (source.empty()) return; // never given
    Node n;
    n.set("value", std::move(value));
    n.set("source", string_node(source));
    out.set(name, n);
  };
  auto with_unit = [](double value, const char* unit) { return Node::scalar(fmt::format("{} {}", value, unit)); };
  out.set("name", string_node(h.name));
  if (!h.aliases.empty()) out.set("aliases", list_node(h.aliases));
  out.set("device_name", string_node(h.device_name));
  out.set("sm", Node::scalar(h.sm));
  figure_node("memory", Node::scalar(fmt::format("{}", h.memory)));
  figure_node("bf16", with_unit(h.bf16 / 1e12, "TFLOP/s"));
  figure_node("fp8", with_unit(h.fp8 / 1e12, "TFLOP/s"));
  figure_node("fp4", with_unit(h.fp4 / 1e12, "TFLOP/s"));
  figure_node("fp8_relative", number_node(h.fp8_relative));
  figure_node("bandwidth", with_unit(h.bandwidth / 1e12, "TB/s"));
  figure_node("achieved_bandwidth", with_unit(h.achieved_bandwidth / 1e12, "TB/s"));
  figure_node("scale_up", with_unit(h.scale_up / 1e9, "GB/s"));
  figure_node("scale_up_domain", number_node(h.scale_up_domain));
  figure_node("network", with_unit(h.network / 1e9, "GB/s"));
  figure_node("host_link", with_unit(h.host_link / 1e9, "GB/s"));
  figure_node("host_memory", with_unit(h.host_memory / 1e9, "GB/s"));
  figure_node("launch_latency", with_unit(h.launch_latency, "s"));
  figure_node("allocator_reserve", number_node(h.allocator_reserve));
  Node rows;
  rows.kind = Node::Kind::List;
  for (const EfficiencyRow& r : h.efficiencies) {
    Node n;
    n.set("provider", string_node(r.provider));
    n.set("family", string_node(r.family));
    if (!r.op.empty()) n.set("op", string_node(r.op));
    n.set("pass", string_node(r.pass));
    if (r.size) n.set("size", number_node(*r.size));
    n.set("value", number_node(r.value));
    n.set("source", string_node(r.source));
    rows.items.push_back(std::move(n));
  }
  out.set("efficiencies", rows);
  rows.items.clear();
  for (const CollectiveRow& r : h.collectives) {
    Node n;
    if (!r.provider.empty()) n.set("provider", string_node(r.provider));
    n.set("kind", string_node(r.kind));
    n.set("link", string_node(r.link));
    n.set("share", number_node(r.share));
    n.set("latency", with_unit(r.latency, "s"));
    n.set("source", string_node(r.source));
    rows.items.push_back(std::move(n));
  }
  out.set("collectives", rows);
  rows.items.clear();
  for (const ReserveRow& r : h.reserve) {
    Node n;
    if (!r.provider.empty()) n.set("provider", string_node(r.provider));
    n.set("name", string_node(r.name));
    n.set("per", string_node(r.per));
    n.set("bytes", Node::scalar(fmt::format("{}", r.bytes)));
    if (r.channels != 1) n.set("channels", number_node(r.channels));
    n.set("source", string_node(r.source));
    rows.items.push_back(std::move(n));
  }
  out.set("reserve", rows);
  return out;
}

} // namespace gdn::config
