#pragma once
#include "small_run.h"

namespace gdn::test {

// Kills a random process of a run (a rank or the launcher) with SIGKILL at a random moment and resumes,
// GDN_KILLS times in all if that is set, and compares with the run that nothing disturbed.
void kill_and_resume(const Layout& layout, int kills);

} // namespace gdn::test
