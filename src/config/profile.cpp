#include "config/profile.h"

#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"

namespace gdn::config {

const ProfileRow* ProfileSet::find(std::string_view key) const {
  for (const ProfileRow& r : rows)
    if (r.key == key) return &r;
  return nullptr;
}

const ProfileSet* Profile::find(std::string_view modules) const {
  for (const ProfileSet& s : sets)
    if (s.modules == modules) return &s;
  return nullptr;
}

std::string to_yaml(const Profile& profile) {
  Node map;
  map.kind = Node::Kind::Map;
  map.set("schema", string_node(std::string(kProfileSchema)));
  Node identity;
  identity.kind = Node::Kind::Map;
  for (const auto& [key, value] : profile.identity) identity.set(key, string_node(value));
  map.set("identity", std::move(identity));
  Node sets;
  sets.kind = Node::Kind::List;
  for (const ProfileSet& s : profile.sets) {
    Node set, rows;
    set.kind = rows.kind = Node::Kind::Map;
    set.set("modules", string_node(s.modules));
    if (!s.settings.empty()) set.set("set", list_node(s.settings));
    for (const ProfileRow& r : s.rows) {
      Node row;
      row.kind = Node::Kind::Map;
      row.set("value", number_node(r.value));
      row.set("unit", string_node(r.unit));
      row.set("source", string_node(r.source));
      rows.set(r.key, std::move(row));
    }
    set.set("rows", std::move(rows));
    sets.items.push_back(std::move(set));
  }
  map.set("sets", std::move(sets));
  return to_yaml(map);
}

Profile read_profile(const Node& map) {
  Fields fields(map);
  Profile profile;
  if (const Node* schema = fields.require("schema"); schema && as_string(*schema) != kProfileSchema)
    schema->fail("this is not a profile of a known version", "expected schema: " + std::string(kProfileSchema));
  if (const Node* identity = fields.require("identity")) {
    if (identity->kind != Node::Kind::Map) identity->fail("expected a map of names and values");
    for (const Entry& e : identity->entries) profile.identity.push_back({e.key, as_string(e.value)});
  }
  if (const Node* sets = fields.require("sets")) {
    if (sets->kind != Node::Kind::List) sets->fail("expected a list of module sets");
    for (const Node& s : sets->items) {
      Fields set(s);
      ProfileSet out;
      set.need("modules", out.modules);
      if (const Node* settings = set.find("set")) out.settings = as_strings(*settings);
      if (const Node* rows = set.require("rows")) {
        if (rows->kind != Node::Kind::Map) rows->fail("expected a map of rows");
        for (const Entry& e : rows->entries) {
          Fields row(e.value);
          ProfileRow r{e.key, 0, "", ""};
          if (const Node* value = row.require("value")) r.value = as_double(*value, -1e300, 1e300);
          row.need("unit", r.unit);
          row.need("source", r.source);
          row.done();
          out.rows.push_back(std::move(r));
        }
      }
      set.done();
      profile.sets.push_back(std::move(out));
    }
  }
  fields.done();
  return profile;
}

Profile read_profile(const std::string& file) {
  return read_profile(parse_yaml(read_text_file(file, kMeasurements), file, kMeasurements));
}

} // namespace gdn::config
