/* The rings of messages: a counter of fragments written, one of fragments read, and the fragments with their headers.
 * Counters are written with release and read with acquire order, as in _exchange.c.
 */
#include "_exchange.h"

#include <sched.h>

enum { LINE = 128, HEADER = 64, RING = 4 }; /* as in memory_layout.py */

static int64_t load(const char *at) { return __atomic_load_n((const int64_t *)at, __ATOMIC_ACQUIRE); }

static void store(char *at, int64_t value) { __atomic_store_n((int64_t *)at, value, __ATOMIC_RELEASE); }

static char *fragment_at(char *ring, int64_t fragment_bytes, int64_t done) {
    return ring + 2 * LINE + done % RING * (HEADER + fragment_bytes);
}

int64_t ring_bytes(int64_t fragment_bytes) { return 2 * LINE + RING * (HEADER + fragment_bytes); }

int ring_put(char *ring, int64_t fragment_bytes, int64_t done, const Fragment *fragment) {
    if (done - load(ring + LINE) >= RING) return 0;
    char *at = fragment_at(ring, fragment_bytes, done);
    int64_t *header = (int64_t *)at;
    header[0] = fragment->tag, header[1] = fragment->dtype;
    header[2] = fragment->total, header[3] = fragment->offset, header[4] = fragment->bytes;
    exchange_copy(at + HEADER, fragment->data, fragment->bytes);
    store(ring, done + 1);
    return 1;
}

int ring_take(char *ring, int64_t fragment_bytes, int64_t done, const Fragment *fragment) {
    if (load(ring) <= done) return 0;
    const char *at = fragment_at(ring, fragment_bytes, done);
    const int64_t *header = (const int64_t *)at;
    if (header[0] != fragment->tag || header[1] != fragment->dtype) return 0;
    if (header[2] != fragment->bytes || header[3] != 0 || header[4] != fragment->bytes) return 0;
    exchange_copy(fragment->data, at + HEADER, fragment->bytes);
    store(ring + LINE, done + 1);
    return 1;
}

int ring_spin(const char *ring, int64_t done, long spins) {
    for (long i = 0; i < spins + YIELDS; i++) {
        if (load(ring) > done) return 1;
        if (i < spins) PAUSE();
        else sched_yield();
    }
    return 0;
}
