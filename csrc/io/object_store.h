// Objects of a store, as far as a load needs them. Whoever implements it speaks to the store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dcpx::io {

class ObjectStore {  // Thread-safe. All block, and throw what the implementation throws.
 public:
  struct Object {
    std::uint64_t size_bytes = 0;
    std::string tag;             // differs once the name means another object
    std::vector<std::byte> end;  // its last bytes
  };
  // Memory that stays as long as its owner.
  struct Bytes {
    std::shared_ptr<const void> owner;
    const std::byte* data = nullptr;
  };

  ObjectStore() = default;
  ObjectStore(const ObjectStore&) = delete;
  virtual ~ObjectStore() = default;

  // Returns what an object is, with its last `nbytes` bytes, or all of a shorter one.
  virtual Object look(const std::string& name, std::uint64_t nbytes) = 0;
  // Returns [offset, offset + nbytes) of the object of this tag.
  virtual Bytes read(const std::string& name, const std::string& tag, std::uint64_t offset,
                     std::uint64_t nbytes) = 0;
};

}  // namespace dcpx::io
