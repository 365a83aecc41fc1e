#pragma once
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

namespace gdn::test {

// A file system of 8 MiB that only this program and those it starts see, if the system permits one.
class SmallDisk {
public:
  explicit SmallDisk(std::filesystem::path path) : path_(std::move(path)) {
    std::filesystem::create_directories(path_);
    mounted_ = own_mounts() && ::mount("tmpfs", path_.c_str(), "tmpfs", 0, "size=8m") == 0;
  }
  SmallDisk(const SmallDisk&) = delete;
  ~SmallDisk() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }

  bool mounted() const { return mounted_; }
  // Fills the disk but for so many bytes.
  void leave_room(std::int64_t bytes) const {
    leave_all_room();
    struct statvfs s = {};
    if (::statvfs(path_.c_str(), &s) != 0) throw std::runtime_error("no disk at " + path_.string());
    const auto room = static_cast<std::int64_t>(s.f_bavail * s.f_frsize);
    if (bytes > room) throw std::runtime_error("the disk is too small for this test");
    std::ofstream out(ballast(), std::ios::binary);
    const std::vector<char> block(4096, 'x');
    for (std::int64_t at = 0; at < room - bytes; at += 4096) out.write(block.data(), std::min<std::int64_t>(4096, room - bytes - at));
  }
  void leave_all_room() const { std::filesystem::remove(ballast()); }

private:
  // Once for the program: mounts of its own, as root or as the root of a user namespace.
  static bool own_mounts() {
    static const bool own = [] {
      const std::string user = "0 " + std::to_string(::geteuid()) + " 1";
      if (::unshare(CLONE_NEWNS) != 0) {
        if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
        std::ofstream("/proc/self/uid_map") << user;
      }
      return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
    }();
    return own;
  }
  std::filesystem::path ballast() const { return path_ / "ballast"; }

  std::filesystem::path path_;
  bool mounted_ = false;
};

} // namespace gdn::test
