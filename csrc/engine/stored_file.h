// One data file of a checkpoint on the reading side: what its footer or its zip headers say, and
// the checksums of the blocks that a load needs.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/unique_fd.h"
#include "format/file_footer.h"
#include "format/zip_parse.h"
#include "io/file.h"

namespace dcpx::engine {

// What the metadata says of a file.
struct StoredFileSpec {
  std::string path;      // relative to the checkpoint directory
  bool is_ours = false;  // the file table names it, so it must carry a footer with these values
  std::uint64_t file_bytes = 0;
  FileId file_id{};
  std::uint32_t footer_crc = 0;
  SaveId save_id{};  // of the metadata; zeros: it is not compared
};

// One stored item that a load asks for.
struct WantedItem {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  bool is_tensor = true;
};

enum class LocatedKind : std::uint8_t {
  kPlain,  // a strided payload at a known place
  kBytes,  // the item's bytes are the payload
  kTorch,  // only torch's own loader understands it
};

// Where the payload of a stored item lies. Sizes, strides and storage_offset in elements.
struct LocatedItem {
  LocatedKind kind = LocatedKind::kBytes;
  std::uint64_t payload_offset = 0;  // from the start of the file
  std::uint64_t payload_bytes = 0;
  std::uint64_t storage_offset = 0;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::string dtype;         // ours: "float32"
  std::string storage_name;  // foreign: "FloatStorage", dtype_name where that is untyped
  std::string dtype_name;
  bool is_big_endian = false;
};

// Where the files of a load lie: beneath a directory, or as objects of a store.
struct InputFolder {
  UniqueFd dir_fd;
  std::shared_ptr<io::ObjectStore> store;  // nullptr: a directory
  std::string path;

  io::InputFile open(const std::string& relative_path) const {
    return store != nullptr ? io::InputFile::open(store, path, relative_path)
                            : io::InputFile::open(dir_fd.get(), path, relative_path);
  }
};

class StoredFile {  // open() and close() are the owner's; the rest is thread-safe between them.
 public:
  explicit StoredFile(StoredFileSpec spec) : spec_(std::move(spec)) {}

  const StoredFileSpec& spec() const noexcept { return spec_; }
  const io::InputFile& file() const noexcept { return file_; }
  bool is_verifiable() const noexcept { return spec_.is_ours; }
  std::uint64_t data_bytes() const noexcept {
    return spec_.is_ours ? tail_.data_bytes : file_.size_bytes();
  }

  // Opens the file and checks it against the metadata; a later call checks that it is still the
  // same file. Throws Error(kStorage, kCorruption, kUnsupported).
  void open(const InputFolder& folder);
  void close() { file_ = io::InputFile(); }
  // Allows direct reads too, where the file system does. REQUIRES: open.
  void open_direct() { file_.open_direct(); }
  void close_direct() { file_.close_direct(); }

  // Finds items by their offset. Of an object's end it keeps what load_blocks() needs, if
  // `keeps_end`. REQUIRES: open. Throws Error(kCorruption) for what the file does not hold.
  void locate(const std::vector<WantedItem>& wanted, const std::vector<std::uint32_t>& indices,
              bool keeps_end, std::vector<LocatedItem>& located);

  // Reads and checks the checksums of blocks [first, last]. REQUIRES: open, is_verifiable().
  void load_blocks(std::uint64_t first, std::uint64_t last);
  std::uint32_t block_crc(std::uint64_t block) const { return blocks_[block - first_block_]; }

 private:
  void refuse_overlaps(const std::vector<WantedItem>& wanted,
                       const std::vector<std::uint32_t>& indices) const;
  LocatedItem locate_foreign(const WantedItem& wanted);

  StoredFileSpec spec_;
  io::InputFile file_;
  Tail tail_;
  bool was_opened_ = false;
  std::uint64_t inode_ = 0;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t first_block_ = 0;
  std::vector<std::uint32_t> blocks_;
};

}  // namespace dcpx::engine
