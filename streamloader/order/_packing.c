/* Packs the remainders of documents into rows by best fit, without the interpreter's lock.

   `packing.py` states the rule; `_pack` there is the same function in Python. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DOCUMENTS (1 << 16) /* of a group */
#define MAX_LENGTH (1 << 30)
#define NONE UINT32_MAX
#define LEVELS 6 /* 64**6 is more than MAX_LENGTH */

/* The index of the lowest bit of a word that is not 0. */
static inline uint32_t
lowest(uint64_t word)
{
#if defined(__GNUC__)
    return (uint32_t)__builtin_ctzll(word);
#else
    uint32_t index = 0;
    for (; !(word & 1); word >>= 1)
        index++;
    return index;
#endif
}

/* A set of the free spaces of rows. Bit i of a level says whether word i of the level below has a bit. */
typedef struct {
    uint64_t *bits[LEVELS];
    uint32_t words[LEVELS];
    int levels;
} Spaces;

static void
add(Spaces *spaces, uint32_t i)
{
    for (int level = 0; level < spaces->levels; level++, i >>= 6) {
        uint64_t *word = &spaces->bits[level][i >> 6], before = *word;
        *word |= UINT64_C(1) << (i & 63);
        if (before)
            return;
    }
}

static void
discard(Spaces *spaces, uint32_t i)
{
    for (int level = 0; level < spaces->levels; level++, i >>= 6) {
        uint64_t *word = &spaces->bits[level][i >> 6];
        *word &= ~(UINT64_C(1) << (i & 63));
        if (*word)
            return;
    }
}

/* Return the least free space that is not less than i, or NONE. */
static uint32_t
least(const Spaces *spaces, uint32_t i)
{
    for (int level = 0; level < spaces->levels && i >> 6 < spaces->words[level]; level++) {
        uint64_t word = spaces->bits[level][i >> 6] >> (i & 63);
        if (word) {
            i += lowest(word);
            while (level--)
                i = i << 6 | lowest(spaces->bits[level][i]);
            return i;
        }
        i = (i >> 6) + 1;
    }
    return NONE;
}

typedef struct {
    uint32_t size, document;
} Rest;

typedef struct {
    Rest *rests, *sorted;             /* of a group, by document and by size */
    uint32_t *row_of;                 /* the row of each document */
    uint32_t *below;                  /* of each row, the next row with the same free space */
    uint32_t *number;                 /* of each row among the rows by first document */
    uint32_t *top;                    /* of each free space that is in `spaces`, the row that got it last */
    uint32_t length;
    Spaces spaces;
    void *memory;
} Packer;

/* Sort by size, the largest first, and keep the order of equal sizes. Return where they are. */
static const Rest *
sort(Packer *packer, uint32_t count)
{
    Rest *from = packer->rests, *to = packer->sorted;
    for (int shift = 0; shift < 32 && packer->length >> shift; shift += 8) {
        uint32_t starts[256] = {0}, start = 0;
        for (uint32_t i = 0; i < count; i++)
            starts[from[i].size >> shift & 255]++;
        for (int digit = 255; digit >= 0; digit--) {
            uint32_t equal = starts[digit];
            starts[digit] = start;
            start += equal;
        }
        for (uint32_t i = 0; i < count; i++)
            to[starts[from[i].size >> shift & 255]++] = from[i];
        Rest *swapped = from;
        from = to;
        to = swapped;
    }
    return from;
}

/* Put each remainder into a row, and return the number of rows. */
static uint32_t
fit(Packer *packer, const Rest *rests, uint32_t count)
{
    Spaces *spaces = &packer->spaces;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t size = rests[i].size, space = least(spaces, size), row;
        if (space == NONE) {
            space = packer->length;
            row = rows++;
        } else {
            row = packer->top[space];
            packer->top[space] = packer->below[row];
            if (packer->below[row] == NONE)
                discard(spaces, space);
        }
        packer->row_of[rests[i].document] = row;
        if ((space -= size)) {
            int known = spaces->bits[0][space >> 6] >> (space & 63) & 1;
            packer->below[row] = known ? packer->top[space] : NONE;
            packer->top[space] = row;
            if (!known)
                add(spaces, space);
        }
    }
    for (uint32_t space; (space = least(spaces, 0)) != NONE;)
        discard(spaces, space);
    return rows;
}

/* Pack a group; write the documents of its rows and how many each row has. Return the number of rows. */
static uint32_t
pack_group(Packer *packer, const uint32_t *sizes, uint32_t documents, uint16_t *items, uint32_t *counts)
{
    uint32_t count = 0, numbers = 0, start = 0;
    for (uint32_t document = 0; document < documents; document++) {
        packer->rests[count] = (Rest){sizes[document], document};
        count += sizes[document] != 0;
    }
    const uint32_t rows = fit(packer, sort(packer, count), count);
    uint32_t *next = packer->below; /* the place of the next item of each row */
    memset(packer->number, 0xff, 4 * (size_t)rows);
    memset(counts, 0, 4 * (size_t)rows);
    for (uint32_t document = 0; document < documents; document++)
        if (sizes[document]) {
            uint32_t *number = &packer->number[packer->row_of[document]];
            if (*number == NONE)
                *number = numbers++;
            counts[*number]++;
        }
    for (uint32_t row = 0; row < rows; row++) {
        next[row] = start;
        start += counts[row];
    }
    for (uint32_t document = 0; document < documents; document++)
        if (sizes[document])
            items[next[packer->number[packer->row_of[document]]]++] = (uint16_t)document;
    return rows;
}

/* Allocate for groups of up to `most` documents. Return 0 without memory. */
static int
allocate(Packer *packer, uint32_t length, uint32_t most)
{
    Spaces *spaces = &packer->spaces;
    size_t words = 0, spaces_size = (size_t)length + 1;
    uint32_t bits = length + 1;
    do {
        bits = (bits + 63) >> 6;
        words += spaces->words[spaces->levels++] = bits;
    } while (bits > 1);
    uint64_t *memory = calloc(words + 2 * (size_t)most + (3 * (size_t)most + spaces_size + 1) / 2, 8);
    if (!(packer->memory = memory))
        return 0;
    for (int level = 0; level < spaces->levels; level++) {
        spaces->bits[level] = memory;
        memory += spaces->words[level];
    }
    packer->length = length;
    packer->rests = (Rest *)memory;
    packer->sorted = packer->rests + most;
    packer->row_of = (uint32_t *)(packer->sorted + most);
    packer->below = packer->row_of + most;
    packer->number = packer->below + most;
    packer->top = packer->number + most;
    return 1;
}

typedef struct {
    Py_buffer rests, edges, items, counts, rows;
} Arrays;

/* Return the documents of the largest group, 1 at least, or 0 for arrays that do not match. */
static uint32_t
check(const Arrays *arrays, Py_ssize_t length)
{
    const uint32_t *rests = arrays->rests.buf;
    const int64_t *edges = arrays->edges.buf;
    const int64_t groups = arrays->edges.len / 8 - 1, documents = arrays->rests.len / 4;
    int64_t most = 1, items = 0;
    if (length < 1 || length > MAX_LENGTH || groups < 0 || arrays->rows.len / 8 < groups || edges[0] != 0 ||
        edges[groups] != documents)
        return 0;
    for (int64_t group = 0; group < groups; group++) {
        int64_t size = edges[group + 1] - edges[group];
        if (edges[group] < 0 || edges[group + 1] > documents || size < 0 || size > MAX_DOCUMENTS)
            return 0;
        most = size > most ? size : most;
    }
    for (int64_t document = 0; document < documents; document++) {
        if (rests[document] > length)
            return 0;
        items += rests[document] != 0;
    }
    return items > arrays->items.len / 2 || items > arrays->counts.len / 4 ? 0 : (uint32_t)most;
}

static int64_t
pack_groups(Packer *packer, const Arrays *arrays)
{
    const int64_t *edges = arrays->edges.buf;
    uint16_t *items = arrays->items.buf;
    uint32_t *counts = arrays->counts.buf;
    int64_t *rows = arrays->rows.buf, total = 0;
    for (Py_ssize_t group = 0; group < arrays->edges.len / 8 - 1; group++) {
        const uint32_t *sizes = (const uint32_t *)arrays->rests.buf + edges[group];
        rows[group] = pack_group(packer, sizes, (uint32_t)(edges[group + 1] - edges[group]), items, counts + total);
        for (int64_t row = total; row < total + rows[group]; row++)
            items += counts[row];
        total += rows[group];
    }
    return total;
}

static PyObject *
pack(PyObject *Py_UNUSED(module), PyObject *args)
{
    Arrays arrays;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y*y*n(w*w*w*)", &arrays.rests, &arrays.edges, &length, &arrays.items, &arrays.counts,
                          &arrays.rows))
        return NULL;
    Packer packer = {0};
    int64_t total = -1;
    PyThreadState *released = PyEval_SaveThread();
    uint32_t most = check(&arrays, length);
    if (most && allocate(&packer, (uint32_t)length, most))
        total = pack_groups(&packer, &arrays);
    free(packer.memory);
    PyEval_RestoreThread(released);
    PyBuffer_Release(&arrays.rests);
    PyBuffer_Release(&arrays.edges);
    PyBuffer_Release(&arrays.items);
    PyBuffer_Release(&arrays.counts);
    PyBuffer_Release(&arrays.rows);
    if (!most)
        PyErr_SetString(PyExc_ValueError, "rests, edges, length and out do not match");
    else if (total < 0)
        return PyErr_NoMemory();
    return most ? PyLong_FromLongLong(total) : NULL;
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, "pack(rests, edges, length, out): see packing.py"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_packing", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__packing(void)
{
    return PyModuleDef_Init(&definition);
}
