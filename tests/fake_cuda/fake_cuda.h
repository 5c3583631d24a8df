// The fake driver's own interface, for tests: C, so that Python's ctypes has it too (fake.py).
//
// Addresses of device memory are numbers: the CPU cannot touch what they name. Streams are handles
// as CUDA's; 0 and 1 are the legacy default stream, 2 the calling thread's own, which here need a
// device beside them. A forked child may call all of it; what was queued is not its own. Functions
// are thread-safe. Those that return int return 0 or a CUresult.
#pragma once

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

// Waits for all that is queued, then forgets failures, counts, reports, notes, the test's memory
// and streams, lost devices, and all settings. What the program holds (contexts, its streams,
// events, modules, registrations) stays. The seed chooses when work runs.
void fake_reset(uint64_t seed);
void fake_set_driver_version(int version);  // 12040 is 12.4; default 13000
void fake_set_pace(int pace);               // schedule.h's Pace; default -1, by seed
void fake_limit_pinned(uint64_t nbytes);    // more is refused: CUDA_ERROR_OUT_OF_MEMORY

// Device memory of the test. `is_adjacent`: right behind the last one, where no other allocation
// ever touches its neighbour. 0: no room. fake_free is what a caching allocator does: at once, with
// the address soon reused, whatever is queued; a copy of the program's that has not run is
// reported.
uint64_t fake_alloc(int device, uint64_t nbytes, int is_adjacent);
int fake_free(uint64_t address);
int fake_device_of(uint64_t address);  // -1: host memory
// At once, ordered behind nothing.
int fake_write(uint64_t address, const void* data, uint64_t nbytes);
int fake_read(uint64_t address, void* data, uint64_t nbytes);

// A caller's stream, and what a training step does in it. fake_stream_write reads `data` before it
// returns; fake_stream_read writes `data` when it runs.
uint64_t fake_make_stream(int device, int is_non_blocking);
int fake_destroy_stream(uint64_t stream);
int fake_stream_write(int device, uint64_t stream, uint64_t address, const void* data,
                      uint64_t nbytes);
int fake_stream_read(int device, uint64_t stream, uint64_t address, void* data, uint64_t nbytes);
int fake_stream_sync(int device, uint64_t stream);
void fake_sync_all(void);
void fake_set_stream_pace(int device, uint64_t stream, int pace);  // of what is queued from now on
void fake_release_hung(void);  // lets work of pace kPaceHung run; fake_sync_all does so too
int fake_set_capturing(uint64_t stream, int is_capturing);
int fake_is_capture_broken(uint64_t stream);

// The n-th call from now (1: the next one) of an entry point returns `code` and does nothing; calls
// that give something back do it all the same. Sticky: the current context's device is lost too.
// Names have no _v2, but cuMemcpyBatchAsync_v2 is the form of 13.0. kNotFound: no such name.
int fake_fail(const char* entry, int64_t nth, int code, int is_sticky);
void fake_clear_failures(void);
void fake_refuse_fatbin(int is_refused);
// From now on, or after `works` more copies and kernels of the device have run, its queue never
// runs and all its calls return `code`.
void fake_lose_device(int device, int code, int64_t works);

// Texts: written to `text` as far as there is room, always terminated. They return the size that
// is needed, the terminator included.
size_t fake_counts(char* text, size_t nbytes);   // lines "name value"
size_t fake_reports(char* text, size_t nbytes);  // lines: what a program must not do
size_t fake_notes(char* text, size_t nbytes);    // lines: what costs it time
size_t fake_entry_points(char* text, size_t nbytes);
int64_t fake_count(const char* name);  // 0 for a name that was never counted
void fake_clear_reports(void);
void fake_clear_counts(void);  // peaks begin at what is there
int fake_context_depth(void);  // of the calling thread
int fake_capture_mode(void);   // of the calling thread
}
#pragma GCC visibility pop
