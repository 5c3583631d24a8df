// Registered host memory, what an address is, and device memory that a program allocates itself.
#include <cstring>

#include "world.h"

using namespace fake;

FAKE_EXPORT Result cuMemHostRegister_v2(void* data, std::size_t nbytes, unsigned flags) {
  Call call("cuMemHostRegister", kNeedsContext | kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  World& w = world();
  const auto address = reinterpret_cast<Address>(data);
  if (data == nullptr || nbytes == 0) return call.wrong(kInvalidValue, "no memory");
  if (w.memory.device_of(address) >= 0) return call.wrong(kInvalidValue, "device memory");
  if (!is_mapped(address, nbytes)) return call.wrong(kInvalidValue, "memory that is not mapped");
  if (w.memory.pinned_bytes + nbytes > w.settings.pinned_limit_bytes) return kOutOfMemory;
  const bool is_portable = (flags & kHostRegisterPortable) != 0U;
  return w.memory.add({address, nbytes, current_device(), is_portable});
}

FAKE_EXPORT Result cuMemHostUnregister(void* data) {
  Call call("cuMemHostUnregister", kNeedsContext | kUnsafeInCapture);
  if (call.is_dead()) return call.result();
  World& w = world();
  const auto address = reinterpret_cast<Address>(data);
  const Registration* found = w.memory.registration_of(address);
  if (found == nullptr || found->address != address)
    return call.wrong(kNotRegistered, "memory that is not registered");
  if (!is_mapped(address, found->nbytes))
    call.wrong(kSuccess, "memory that was unmapped while it was registered");
  for (const StreamPtr& stream : w.living_streams())
    for (const WorkPtr& work : stream->queue)
      for (const auto& [start, nbytes] : work->host_ranges)
        if (!work->is_over && start < address + found->nbytes && start + nbytes > address)
          call.wrong(kSuccess, "memory that " + work->what + " is going to use");
  w.memory.remove(address);
  return call.result();
}

namespace {

struct Facts {
  bool is_known = false;
  const Allocation* allocation = nullptr;
  const Registration* registration = nullptr;
};

Facts facts_of(Address address) {
  Facts facts;
  facts.allocation = world().memory.find(address);
  facts.registration = world().memory.registration_of(address);
  facts.is_known = facts.allocation != nullptr || facts.registration != nullptr;
  return facts;
}

template <typename T>
void put(void* out, T value) {
  std::memcpy(out, static_cast<const void*>(&value), sizeof value);
}

// Zeros, and device -2, for memory that the driver does not know.
Result tell(void* out, int attribute, Address address, const Facts& facts) {
  const bool is_device = facts.allocation != nullptr;
  const int device = is_device        ? facts.allocation->device
                     : facts.is_known ? facts.registration->device
                                      : -2;
  const Address start = is_device        ? facts.allocation->address
                        : facts.is_known ? facts.registration->address
                                         : 0;
  const std::uint64_t nbytes = is_device        ? facts.allocation->nbytes
                               : facts.is_known ? facts.registration->nbytes
                                                : 0;
  switch (attribute) {
    case kPointerContext:
      put(out, facts.is_known ? context_of(device) : nullptr);
      return kSuccess;
    case kPointerMemoryType:
      put(out, is_device ? unsigned(kDeviceMemory) : facts.is_known ? unsigned(kHostMemory) : 0U);
      return kSuccess;
    case kPointerDeviceAddress:
      put(out, facts.is_known ? address : Address{0});
      return kSuccess;
    case kPointerHostAddress:
      put(out, facts.is_known && !is_device ? address : Address{0});
      return kSuccess;
    case kPointerIsManaged:
      put(out, 0U);
      return kSuccess;
    case kPointerOrdinal:
      put(out, device);
      return kSuccess;
    case kPointerRangeStart:
      put(out, start);
      return kSuccess;
    case kPointerRangeBytes:
      put(out, std::size_t{nbytes});
      return kSuccess;
    case kPointerIsMapped:
      put(out, is_device ? 1U : 0U);
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

}  // namespace

FAKE_EXPORT Result cuPointerGetAttribute(void* out, int attribute, Address address) {
  Call call("cuPointerGetAttribute");
  if (call.is_refused()) return call.result();
  const Facts facts = facts_of(address);
  return facts.is_known ? tell(out, attribute, address, facts) : kInvalidValue;
}

FAKE_EXPORT Result cuPointerGetAttributes(unsigned count, int* attributes, void** out,
                                          Address address) {
  Call call("cuPointerGetAttributes");
  if (call.is_refused()) return call.result();
  const Facts facts = facts_of(address);
  for (unsigned i = 0; i < count; ++i)
    if (const Result bad = tell(out[i], attributes[i], address, facts)) return bad;
  return kSuccess;
}

// Counted, so that a test can say that nothing is ever allocated on a device.
FAKE_EXPORT Result cuMemAlloc_v2(Address* out, std::size_t nbytes) {
  Call call("cuMemAlloc", kNeedsContext | kUnsafeInCapture);
  if (call.is_refused()) return call.result();
  if (nbytes == 0) return kInvalidValue;
  *out = world().memory.allocate(current_device(), nbytes, true, false);
  return *out == 0 ? kOutOfMemory : kSuccess;
}

FAKE_EXPORT Result cuMemFree_v2(Address address) {
  Call call("cuMemFree", kUnsafeInCapture);
  if (call.is_dead()) return call.result();
  World& w = world();
  const Allocation* found = w.memory.find(address);
  if (found == nullptr || found->address != address || !found->is_drivers)
    return call.wrong(kInvalidValue, "memory that cuMemAlloc did not give");
  for (const StreamPtr& stream : w.living_streams())
    if (stream->device == found->device) wait_for(call.lock(), stream->last);
  w.memory.free(address);
  return call.result();
}
