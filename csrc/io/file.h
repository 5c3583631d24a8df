// Files of a checkpoint: created beneath a directory without ever touching what is there, read
// beneath it without following links. Every loop over short counts and EINTR is here.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/unique_fd.h"
#include "io/object_store.h"

namespace dcpx::io {

// Offsets, lengths and addresses of direct I/O are multiples of this. Every Linux block device in
// use takes it (statx reports 512 or 4096).
inline constexpr std::uint64_t kDirectAlignment = 4096;

// What one call of fallocate(2) reserves: a quarter of a second on tmpfs.
inline constexpr std::uint64_t kReserveBytes = 1 << 30;

// A new file under construction. write_at() may be called by many threads at once; the rest by one.
class OutputFile {
 public:
  // Creates the first of `names` that does not exist, O_EXCL | O_NOFOLLOW | O_CLOEXEC, beneath
  // `dir_fd`. Direct I/O where the file system takes it and `use_direct` asks for it.
  // Throws Error(kStorage).
  static OutputFile create(int dir_fd, const std::string& dir_path,
                           const std::vector<std::string>& names, bool use_direct);
  // Opens a file that another process has made, to write to it; no link. Direct I/O as create().
  // Throws Error(kStorage).
  static OutputFile open(int dir_fd, const std::string& dir_path, const std::string& name,
                         bool use_direct);

  OutputFile() = default;
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&& other) noexcept;

  bool is_open() const noexcept { return fd_.is_open(); }
  bool is_direct() const noexcept { return is_direct_.load(std::memory_order_relaxed); }
  const std::string& name() const noexcept { return name_; }
  const std::string& path() const noexcept { return path_; }

  // Reserves [offset, offset + nbytes) and sets the size, so that a full disk is known before the
  // first byte. Asks `is_stopped` before each kReserveBytes, for a file system in memory clears
  // what it reserves; false if that says so. Throws Error(kStorage); does nothing where the file
  // system cannot.
  bool preallocate(std::uint64_t offset, std::uint64_t nbytes,
                   const std::function<bool()>& is_stopped);
  // Makes the file as long as this where it is shorter: with a hole, where preallocate() could do
  // nothing. Throws Error(kStorage).
  void grow_to(std::uint64_t nbytes);
  // Writes all of it. Falls back to buffered I/O where a direct write is refused (EINVAL, EFAULT).
  // Thread-safe. Blocks. Throws Error(kStorage).
  void write_at(const std::byte* data, std::uint64_t nbytes, std::uint64_t offset);
  // Asks the kernel to start writing [offset, offset + nbytes) back from the page cache, and waits
  // until that is done. Both keep the sync() at the end short and make nothing durable. An error is
  // final like one of sync(): waiting takes the descriptor's one report of a lost write, and sync()
  // would not see it any more. Nothing happens where the file system cannot, or a seccomp profile
  // forbids it. Thread-safe. The
  // second blocks. Throws Error(kStorage).
  void start_write_back(std::uint64_t offset, std::uint64_t nbytes);
  void wait_write_back(std::uint64_t offset, std::uint64_t nbytes);
  // Makes the file durable; an error is final and must never be retried: the kernel reports a
  // lost write-back once and then forgets it. Blocks. Throws Error(kStorage).
  void sync();
  // Checks the size against `expected_bytes` and closes. Throws Error(kStorage).
  void close(std::uint64_t expected_bytes);

 private:
  void sync_range(std::uint64_t offset, std::uint64_t nbytes, unsigned flags);

  UniqueFd fd_;
  std::string name_;  // relative to the directory
  std::string path_;  // for messages
  std::atomic<bool> is_direct_{false};
};

// What is read of an object's end as it is opened: the whole footer of most files up to 4 GiB.
inline constexpr std::uint64_t kObjectEndBytes = 256 << 10;

// A file that is read beneath a directory: a regular file, no link on the way. Or an object.
class InputFile {  // read_at() is thread-safe.
 public:
  // Throws Error(kStorage) when it cannot be opened, Error(kCorruption) when it is no regular file
  // or `relative_path` leaves the directory.
  static InputFile open(int dir_fd, const std::string& dir_path, const std::string& relative_path);
  // The same of an object, whose name is `relative_path`. Throws as the store, too.
  static InputFile open(const std::shared_ptr<ObjectStore>& store, const std::string& dir_path,
                        const std::string& relative_path);

  std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  // Differs once the name means another file or object.
  std::uint64_t inode() const noexcept { return inode_; }
  const std::string& path() const noexcept { return path_; }
  int fd() const noexcept { return fd_.get(); }
  bool is_object() const noexcept { return store_ != nullptr; }

  // Reads [offset, offset + nbytes) of an object, and up to `ahead` bytes behind it, for reads to
  // come; nothing of a file, nor where all is there. forget() drops what was kept. No read may be
  // under way. Both throw as read_at().
  void keep(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t ahead = 0);
  void forget() noexcept { kept_.clear(); }
  void forget_all_but_end() noexcept { kept_.resize(std::min<std::size_t>(kept_.size(), 1)); }
  // Returns where a range lies that was kept, until it is forgotten; nullptr: it was not.
  const std::byte* kept(std::uint64_t offset, std::uint64_t nbytes) const noexcept;
  // Returns a range of an object as the store gave it, without a copy. REQUIRES: is_object().
  // Blocks. Throws as read_at().
  ObjectStore::Bytes fetch(std::uint64_t offset, std::uint64_t nbytes) const;

  // Fills all of `parts` from `offset` on; by direct I/O where `is_direct` asks for it and
  // open_direct() made it possible. Falls back to the page cache where a direct read is refused
  // (EINVAL, EFAULT). Blocks. Throws Error(kStorage), Error(kShortRead).
  void read_at(iovec* parts, int count, std::uint64_t offset, bool is_direct = false) const;
  void read_at(std::byte* into, std::uint64_t nbytes, std::uint64_t offset) const;
  // A second descriptor of the same file, for direct I/O, so that each read may choose; none where
  // the file system refuses it. REQUIRES: no read under way.
  void open_direct();
  void close_direct() { direct_fd_ = UniqueFd(); }
  bool has_direct() const noexcept { return direct_fd_.is_open(); }

 private:
  struct Kept {
    std::uint64_t begin = 0;
    std::vector<std::byte> bytes;
  };

  UniqueFd fd_;
  UniqueFd direct_fd_;
  std::string path_;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t inode_ = 0;
  std::shared_ptr<ObjectStore> store_;
  std::string name_;  // of the object
  std::string tag_;
  std::vector<Kept> kept_;  // the end, as long as it is kept, and two more
};

}  // namespace dcpx::io
