#pragma once
#include "trainer/sweep.h"

namespace gdn::trainer {

// The file of a sweep, a gdn.profile/1: its head, then setting after setting as they were measured.

config::ProfileSet to_set(const SweepRow& row);
SweepRow from_set(const config::ProfileSet& set);

// Whatever decides the figures of a sweep, except what is recomputed.
std::string sweep_fingerprint(const Setup& setup);

// Throws Error{Config} with `hint` for a file that was cut short or edited.
config::Profile read_sweep(const std::filesystem::path& file, const std::string& hint);
// What an earlier sweep of this setup has left; empty if there is none. Throws Error{Config} for that of another setup.
config::Profile earlier_sweep(const std::filesystem::path& file, const Setup& setup);

// The first setting with the head of the file, later ones at its end.
void append_to_sweep(const std::filesystem::path& file, config::Profile identity, const SweepRow& row, bool first);

} // namespace gdn::trainer
