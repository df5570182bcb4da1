/* What this machine can do: copy loops as a careful person writes them by hand, over a list of (source, destination).
 *
 * Built and called by limit.py. Not for: anything the library uses.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct move {
    uint64_t src, dst;
};

enum kernel { PLAIN, STREAM, STREAM4, AHEAD, KERNELS };

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

AVX2 static inline void stream128(char *dst, const char *src) {
    __m256i a = _mm256_loadu_si256((const __m256i *)src);
    __m256i b = _mm256_loadu_si256((const __m256i *)(src + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(src + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(src + 96));
    _mm256_stream_si256((__m256i *)dst, a);
    _mm256_stream_si256((__m256i *)(dst + 32), b);
    _mm256_stream_si256((__m256i *)(dst + 64), c);
    _mm256_stream_si256((__m256i *)(dst + 96), d);
}

/* One block, from its beginning to its end. */
AVX2 static void stream(char *dst, const char *src, size_t len) {
    for (size_t at = 0; at < len; at += 128) stream128(dst + at, src + at);
}

/* Four quarters of a block advance together, so that several pages are under way at once. */
AVX2 static void stream4(char *dst, const char *src, size_t len) {
    size_t quarter = len / 4;
    for (size_t at = 0; at < quarter; at += 128)
        for (size_t part = 0; part < 4; part++) stream128(dst + part * quarter + at, src + part * quarter + at);
}

/* The source is asked for 1 KiB ahead, and beyond the end of a block in the next one. */
AVX2 static void ahead(char *dst, const char *src, size_t len, const char *next) {
    const size_t far = 1024;
    for (size_t at = 0; at < len; at += 128) {
        const char *soon = at + far < len ? src + at + far : next + (at + far - len);
        _mm_prefetch(soon, _MM_HINT_NTA);
        _mm_prefetch(soon + 64, _MM_HINT_NTA);
        stream128(dst + at, src + at);
    }
}
#define FENCE() _mm_sfence()
#else
static void stream(char *dst, const char *src, size_t len) { memcpy(dst, src, len); }
static void stream4(char *dst, const char *src, size_t len) { memcpy(dst, src, len); }
static void ahead(char *dst, const char *src, size_t len, const char *next) {
    (void)next;
    memcpy(dst, src, len);
}
#define FENCE()
#endif

/* What one thread does. */
struct share {
    const struct move *moves;
    size_t count, len;
    int kernel;
};

static void *copy_share(void *argument) {
    const struct share *share = argument;
    for (size_t at = 0; at < share->count; at++) {
        char *dst = (char *)share->moves[at].dst;
        const char *src = (const char *)share->moves[at].src;
        switch (share->kernel) {
        case PLAIN: memcpy(dst, src, share->len); break;
        case STREAM: stream(dst, src, share->len); break;
        case STREAM4: stream4(dst, src, share->len); break;
        default: {
            const char *next = at + 1 < share->count ? (const char *)share->moves[at + 1].src : src;
            ahead(dst, src, share->len, next);
        }
        }
    }
    if (share->kernel != PLAIN) FENCE();
    return NULL;
}

static void *same_share(void *argument) {
    struct share *share = argument;
    for (size_t at = 0; at < share->count; at++)
        if (memcmp((const void *)share->moves[at].src, (const void *)share->moves[at].dst, share->len) != 0) {
            share->kernel = -1; /* found: where is in len */
            share->len = at;
            return NULL;
        }
    return NULL;
}

static void *poison_share(void *argument) {
    const struct share *share = argument;
    for (size_t at = 0; at < share->count; at++) memset((void *)share->moves[at].dst, share->kernel, share->len);
    return NULL;
}

#define MOST 64

/* Runs `work` over equal shares, the first in this thread. */
static void in_threads(void *(*work)(void *), struct share *shares, const struct move *moves, size_t count, size_t len,
                       int kernel, int threads) {
    pthread_t ids[MOST];
    int started[MOST] = {0};
    size_t each = (count + (size_t)threads - 1) / (size_t)threads;
    for (int t = 0; t < threads; t++) {
        size_t from = each * (size_t)t < count ? each * (size_t)t : count;
        size_t to = from + each < count ? from + each : count;
        shares[t] = (struct share){moves + from, to - from, len, kernel};
        if (t > 0) started[t] = pthread_create(&ids[t], NULL, work, &shares[t]) == 0;
    }
    work(&shares[0]);
    for (int t = 1; t < threads; t++) {
        if (started[t])
            pthread_join(ids[t], NULL);
        else
            work(&shares[t]);
    }
}

/* Copies `count` blocks of `len` bytes (a multiple of 512, aligned to 32) with one kernel. */
int limit_copy(const struct move *moves, size_t count, size_t len, int kernel, int threads) {
    struct share shares[MOST];
    if (threads < 1 || threads > MOST || kernel < 0 || kernel >= KERNELS || len % 512 != 0) return EINVAL;
    in_threads(copy_share, shares, moves, count, len, kernel, threads);
    return 0;
}

/* Index of a block that is not equal on both sides, or -1. */
int64_t limit_differs(const struct move *moves, size_t count, size_t len, int threads) {
    struct share shares[MOST];
    if (threads < 1 || threads > MOST) return 0;
    in_threads(same_share, shares, moves, count, len, 0, threads);
    for (int t = 0; t < threads; t++)
        if (shares[t].kernel == -1) return (int64_t)(shares[t].moves - moves) + (int64_t)shares[t].len;
    return -1;
}

/* Overwrites every destination. */
int limit_poison(const struct move *moves, size_t count, size_t len, int byte, int threads) {
    struct share shares[MOST];
    if (threads < 1 || threads > MOST) return EINVAL;
    in_threads(poison_share, shares, moves, count, len, byte, threads);
    return 0;
}

/* The same copy by the kernel out of (or into) another process, `a_call` blocks a system call; an errno, or 0.
 * `src` and `dst` are as in the list: for a write the destinations are the other process's addresses. */
int limit_vm(int pid, const struct move *moves, size_t count, size_t len, size_t a_call, int write) {
    struct iovec near[1024], far[1024];
    if (a_call < 1 || a_call > 1024) return EINVAL;
    for (size_t at = 0; at < count; at += a_call) {
        size_t now = count - at < a_call ? count - at : a_call;
        for (size_t i = 0; i < now; i++) {
            near[i] = (struct iovec){(void *)(write ? moves[at + i].src : moves[at + i].dst), len};
            far[i] = (struct iovec){(void *)(write ? moves[at + i].dst : moves[at + i].src), len};
        }
        ssize_t moved = write ? process_vm_writev(pid, near, now, far, now, 0) : process_vm_readv(pid, near, now, far, now, 0);
        if (moved < 0) return errno;
        if ((size_t)moved != now * len) return EIO; /* two GiB and more in one call: ask for fewer blocks a call */
    }
    return 0;
}

/* Makes huge pages of a touched range: 0, or an errno where the kernel will not. */
int limit_collapse(void *address, size_t len) {
    const size_t huge = 2u << 20;
    uintptr_t from = ((uintptr_t)address + huge - 1) / huge * huge;
    uintptr_t to = ((uintptr_t)address + len) / huge * huge;
    if (from >= to) return 0;
    return madvise((void *)from, to - from, 25 /* MADV_COLLAPSE */) == 0 ? 0 : errno;
}
