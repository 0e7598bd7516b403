/* Packs the remainders of documents into rows by best fit, and finds and places the items of rows, without the
   interpreter's lock and without Python for each item.

   `packing.py` states the rules; `_pack`, `_find`, `_locate` and `_place` there are the same functions in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DOCUMENTS (1 << 16) /* of a group */
#define MAX_LENGTH (1 << 30)
#define NONE UINT32_MAX
#define LEVELS 6 /* 64**6 is more than MAX_LENGTH */
/* A thread that gives the lock away may wait 5 ms to get it back, so what takes less than about 20 us keeps it. */
#define FEW_ROWS 256
#define FEW_ITEMS 512
#define FEW_ELEMENTS (1 << 14)

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

static void
release(Py_buffer *buffers, int count)
{
    while (count)
        PyBuffer_Release(&buffers[--count]);
}

static PyObject *
no_match(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays and numbers do not match");
    return NULL;
}

typedef struct {
    Py_buffer rests, edges, items, counts, rows, costs; /* `costs` may be empty */
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
    if (items > arrays->items.len / 2 || items > arrays->counts.len / 4 ||
        (arrays->costs.len && items > arrays->costs.len / 4))
        return 0;
    return (uint32_t)most;
}

static int64_t
pack_groups(Packer *packer, const Arrays *arrays)
{
    const int64_t *edges = arrays->edges.buf;
    uint16_t *items = arrays->items.buf;
    uint32_t *counts = arrays->counts.buf;
    uint32_t *costs = arrays->costs.len ? arrays->costs.buf : NULL;
    int64_t *rows = arrays->rows.buf, total = 0;
    for (Py_ssize_t group = 0; group < arrays->edges.len / 8 - 1; group++) {
        const uint32_t *sizes = (const uint32_t *)arrays->rests.buf + edges[group];
        rows[group] = pack_group(packer, sizes, (uint32_t)(edges[group + 1] - edges[group]), items, counts + total);
        for (int64_t row = total; row < total + rows[group]; row++) {
            uint64_t squares = 0;
            for (uint32_t i = 0; costs && i < counts[row]; i++)
                squares += (uint64_t)sizes[items[i]] * sizes[items[i]];
            if (costs)
                costs[row] = (uint32_t)(squares / packer->length);
            items += counts[row];
        }
        total += rows[group];
    }
    return total;
}

static PyObject *
pack(PyObject *Py_UNUSED(module), PyObject *args)
{
    Arrays arrays;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y*y*n(w*w*w*w*)", &arrays.rests, &arrays.edges, &length, &arrays.items,
                          &arrays.counts, &arrays.rows, &arrays.costs))
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
    PyBuffer_Release(&arrays.costs);
    if (!most)
        PyErr_SetString(PyExc_ValueError, "rests, edges, length and out do not match");
    else if (total < 0)
        return PyErr_NoMemory();
    return most ? PyLong_FromLongLong(total) : NULL;
}

/* The first index in [low, high) of a value that is not less than `value`, or `high`. Values ascend. */
static int64_t
first_of(const uint16_t *values, int64_t low, int64_t high, uint32_t value)
{
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (values[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* What `Packed` has of its rows: `bounds` are the rows before each group and of all, `sums` the documents, the full
   pieces, the items and the other rows before each group, each with one more for all groups. */
typedef struct {
    const int64_t *bounds, *sums;
    const uint16_t *full, *items;
    const uint32_t *ends;
    int64_t groups, full_count, item_count, row_count;
} Tables;

/* Where the items of a row are: of a full piece `place` among these, of another row its `count` items from `start` on.
   Return 0 for a row that the tables lack. */
typedef struct {
    int64_t group, place, start, count;
} Row;

static int
find_row(const Tables *tables, int64_t row, Row *found)
{
    const int64_t groups = tables->groups, *full = tables->sums + groups + 1, *items = full + groups + 1;
    int64_t low = 0, high = groups;
    if (row < 0 || row >= tables->bounds[groups])
        return 0;
    while (high - low > 1) { /* the last group that does not begin after the row */
        int64_t middle = low + (high - low) / 2;
        if (tables->bounds[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    *found = (Row){low, full[low] + row - tables->bounds[low], 0, 1};
    if (found->place < full[low + 1])
        return found->place >= 0 && found->place < tables->full_count;
    const int64_t other = row - full[low + 1];
    if (other < 0 || other >= tables->row_count)
        return 0;
    found->start = items[low] + (uint32_t)(tables->ends[other] - (uint32_t)items[low]);
    found->count = (uint32_t)(tables->ends[other + 1] - tables->ends[other]);
    return found->start >= 0 && found->start + found->count <= tables->item_count;
}

/* Return the number of items of some rows, which are written as far as there is `room`; -1 for an unknown row. */
static int64_t
find_items(const Tables *tables, const int64_t *rows, int64_t count, int64_t *edges, int64_t *documents,
           int64_t *pieces, int64_t room)
{
    const int64_t *full_before = tables->sums + tables->groups + 1;
    int64_t total = edges[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        Row row;
        if (!find_row(tables, rows[i], &row))
            return -1;
        const int64_t begin = full_before[row.group], end = full_before[row.group + 1];
        if (begin < 0 || begin > end || end > tables->full_count)
            return -1;
        const int whole = row.place < end;
        for (int64_t item = 0; item < row.count && total + item < room; item++) {
            uint32_t document = whole ? tables->full[row.place] : tables->items[row.start + item];
            int64_t first = first_of(tables->full, begin, end, document);
            documents[total + item] = tables->sums[row.group] + document;
            /* a piece has the number of the pieces of its document before it, all of which are full */
            pieces[total + item] = (whole ? row.place : first_of(tables->full, first, end, document + 1)) - first;
        }
        edges[i + 1] = total += row.count;
    }
    return total;
}

static PyObject *
find(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { ROWS, BOUNDS, SUMS, FULL, ITEMS, ENDS, EDGES, DOCUMENTS, PIECES, COUNT };
    Py_buffer of[COUNT];
    if (!PyArg_ParseTuple(args, "y*(y*y*y*y*y*)(w*w*w*)", &of[ROWS], &of[BOUNDS], &of[SUMS], &of[FULL], &of[ITEMS],
                          &of[ENDS], &of[EDGES], &of[DOCUMENTS], &of[PIECES]))
        return NULL;
    const int64_t count = of[ROWS].len / 8, groups = of[BOUNDS].len / 8 - 1, room = of[DOCUMENTS].len / 8;
    const Tables tables = {of[BOUNDS].buf, of[SUMS].buf,     of[FULL].buf,      of[ITEMS].buf,       of[ENDS].buf,
                           groups,         of[FULL].len / 2, of[ITEMS].len / 2, of[ENDS].len / 4 - 1};
    int64_t total = -1;
    if (groups > 0 && of[SUMS].len / 8 >= 4 * (groups + 1) && of[EDGES].len / 8 > count &&
        of[PIECES].len >= of[DOCUMENTS].len) {
        PyThreadState *released = count < FEW_ROWS ? NULL : PyEval_SaveThread();
        total = find_items(&tables, of[ROWS].buf, count, of[EDGES].buf, of[DOCUMENTS].buf, of[PIECES].buf, room);
        if (released)
            PyEval_RestoreThread(released);
    }
    release(of, COUNT);
    return total < 0 ? no_match() : PyLong_FromLongLong(total);
}

/* Write where the document of each item is in the slot of its row, which has `block` ascending documents from
   `firsts` on. Return -1, or the first item whose document is not there, or `items` + 1 for arrays that do not match. */
static int64_t
locate_items(const int64_t *known, int64_t known_count, int64_t block, const int64_t *firsts, const int64_t *edges,
             int64_t rows, const int64_t *documents, int64_t items, int64_t *out)
{
    for (int64_t row = 0; row < rows; row++) {
        if (firsts[row] < 0 || firsts[row] > known_count - block || edges[row] < 0 || edges[row + 1] > items)
            return items + 1;
        for (int64_t item = edges[row]; item < edges[row + 1]; item++) {
            const int64_t *base = known + firsts[row], document = documents[item];
            for (int64_t left = block; left > 1; left -= left / 2) /* without branches, which would be mispredicted */
                base += base[left / 2 - 1] < document ? left / 2 : 0;
            if (*base != document)
                return item;
            out[item] = base - known;
        }
    }
    return -1;
}

static PyObject *
locate(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { KNOWN, FIRSTS, EDGES, DOCUMENTS, OUT, COUNT };
    Py_buffer of[COUNT];
    Py_ssize_t block;
    if (!PyArg_ParseTuple(args, "y*n(y*y*y*)w*", &of[KNOWN], &block, &of[FIRSTS], &of[EDGES], &of[DOCUMENTS], &of[OUT]))
        return NULL;
    const int64_t known = of[KNOWN].len / 8, rows = of[FIRSTS].len / 8, items = of[DOCUMENTS].len / 8;
    int64_t missing = items + 1;
    if (block > 0 && of[EDGES].len / 8 > rows && of[OUT].len / 8 >= items) {
        PyThreadState *released = items < FEW_ITEMS ? NULL : PyEval_SaveThread();
        missing = locate_items(of[KNOWN].buf, known, block, of[FIRSTS].buf, of[EDGES].buf, rows, of[DOCUMENTS].buf,
                               items, of[OUT].buf);
        if (released)
            PyEval_RestoreThread(released);
    }
    release(of, COUNT);
    return missing > items ? no_match() : PyLong_FromLongLong(missing);
}

/* The items of rows, and where their documents are: `table` has the first byte and the bytes of each document. */
typedef struct {
    const int64_t *edges, *documents, *pieces, *slot_rows, *table;
    int64_t rows, count, known;
} Items;

/* What is written: of each item where it begins and where it goes, and its size; of each row where its padding goes,
   and its size; and columns, which are NULL if they are not wanted. `segments`: of a step, with the end. */
typedef struct {
    int64_t length, step_rows, item_bytes, segments;
    int64_t *starts, *at, *sizes, *gaps, *gap_sizes;
    void *numbers; /* of documents: int32, or int64 if `wide` */
    int32_t *positions, *cu_seqlens;
    int wide;
} Placed;

/* Write the columns of a segment of `size` elements from `at` on: an item, or padding, whose document is -1. */
static void
write_segment(const Placed *placed, int64_t at, int64_t size, int64_t document)
{
    if (placed->numbers && placed->wide) {
        int64_t *out = (int64_t *)placed->numbers + at;
        for (int64_t i = 0; i < size; i++)
            out[i] = document;
    } else if (placed->numbers) {
        int32_t *out = (int32_t *)placed->numbers + at;
        for (int64_t i = 0; i < size; i++)
            out[i] = (int32_t)document;
    }
    if (placed->positions) {
        int32_t *out = placed->positions + at, step = document >= 0;
        for (int64_t i = 0; i < size; i++)
            out[i] = (int32_t)i * step;
    }
}

/* Return the elements of an item, or -1 if its document is unknown, or has a part of an element. */
static int64_t
size_of(const Placed *placed, const Items *items, int64_t item)
{
    const int64_t row = items->slot_rows[item];
    if (row < 0 || row >= items->known || items->table[2 * row + 1] % placed->item_bytes)
        return -1;
    const int64_t size = items->table[2 * row + 1] / placed->item_bytes - items->pieces[item] * placed->length;
    return size < 0 ? 0 : size < placed->length ? size : placed->length;
}

/* Place the items of a row, whose segments are those of its step from `segment` on. Return the next one, or -1 if they
   do not fit. */
static int64_t
place_row(const Placed *placed, const Items *items, int64_t row, int64_t segment)
{
    const int64_t in_step = row % placed->step_rows, stop = items->edges[row + 1], end = (row + 1) * placed->length;
    int32_t *cu_seqlens = placed->cu_seqlens + row / placed->step_rows * placed->segments;
    int64_t at = row * placed->length;
    for (int64_t item = items->edges[row]; item <= stop; item++) {
        const int gap = item == stop;
        const int64_t size = gap ? end - at : size_of(placed, items, item);
        if (size < 0 || size > end - at)
            return -1;
        if (gap) {
            placed->gaps[row] = at * placed->item_bytes;
            placed->gap_sizes[row] = size * placed->item_bytes;
        } else {
            const int64_t before = items->pieces[item] * placed->length;
            placed->starts[item] = items->table[2 * items->slot_rows[item]] + before * placed->item_bytes;
            placed->at[item] = at * placed->item_bytes;
            placed->sizes[item] = size * placed->item_bytes;
        }
        if (size && placed->segments)
            cu_seqlens[segment++] = (int32_t)(at - (row - in_step) * placed->length);
        write_segment(placed, at, size, gap ? -1 : items->documents[item]);
        at += size;
    }
    if (in_step + 1 == placed->step_rows || row + 1 == items->rows)
        while (segment < placed->segments)
            cu_seqlens[segment++] = (int32_t)((in_step + 1) * placed->length);
    return segment;
}

/* Place the items of all rows. Return -1, or the first row whose items do not fit, or `rows` for arrays that do not
   match. */
static int64_t
place_rows(const Placed *placed, const Items *items)
{
    int64_t segment = 0;
    for (int64_t row = 0; row < items->rows; row++) {
        const int64_t begin = items->edges[row], stop = items->edges[row + 1];
        segment = row % placed->step_rows ? segment : 0;
        if (begin < 0 || begin > stop || stop > items->count ||
            (placed->segments && segment + stop - begin + 1 >= placed->segments))
            return items->rows;
        if ((segment = place_row(placed, items, row, segment)) < 0)
            return row;
    }
    return -1;
}

static PyObject *
place(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { EDGES, DOCUMENTS, PIECES, SLOT_ROWS, TABLE, COPIES, GAPS, NUMBERS, POSITIONS, CU_SEQLENS, COUNT };
    Py_buffer of[COUNT];
    Py_ssize_t length, step_rows, item_bytes;
    if (!PyArg_ParseTuple(args, "(y*y*y*y*y*)(nnn)(w*w*w*w*w*)", &of[EDGES], &of[DOCUMENTS], &of[PIECES],
                          &of[SLOT_ROWS], &of[TABLE], &length, &step_rows, &item_bytes, &of[COPIES], &of[GAPS],
                          &of[NUMBERS], &of[POSITIONS], &of[CU_SEQLENS]))
        return NULL;
    const int64_t rows = of[EDGES].len / 8 - 1, count = of[DOCUMENTS].len / 8, elements = rows * length;
    const Items items = {of[EDGES].buf, of[DOCUMENTS].buf, of[PIECES].buf,      of[SLOT_ROWS].buf,
                         of[TABLE].buf, rows,              count,               of[TABLE].len / 16};
    int64_t bad = rows;
    if (rows > 0 && length > 0 && length <= MAX_LENGTH && item_bytes > 0 && step_rows > 0 &&
        step_rows <= INT32_MAX / length && of[PIECES].len / 8 >= count && of[SLOT_ROWS].len / 8 >= count &&
        of[COPIES].len / 24 >= count && of[GAPS].len / 16 >= rows &&
        (!of[NUMBERS].len || of[NUMBERS].len / 4 >= elements) &&
        (!of[POSITIONS].len || of[POSITIONS].len / 4 >= elements)) {
        int64_t *copies = of[COPIES].buf, *gaps = of[GAPS].buf;
        const Placed placed = {.length = length,
                               .step_rows = step_rows,
                               .item_bytes = item_bytes,
                               .segments = of[CU_SEQLENS].len / 4 / ((rows + step_rows - 1) / step_rows),
                               .starts = copies,
                               .at = copies + count,
                               .sizes = copies + 2 * count,
                               .gaps = gaps,
                               .gap_sizes = gaps + rows,
                               .numbers = of[NUMBERS].len ? of[NUMBERS].buf : NULL,
                               .positions = of[POSITIONS].len ? of[POSITIONS].buf : NULL,
                               .cu_seqlens = of[CU_SEQLENS].buf,
                               .wide = of[NUMBERS].len / 8 >= elements};
        PyThreadState *released = elements < FEW_ELEMENTS ? NULL : PyEval_SaveThread();
        bad = place_rows(&placed, &items);
        if (released)
            PyEval_RestoreThread(released);
    }
    release(of, COUNT);
    return bad == rows ? no_match() : PyLong_FromLongLong(bad);
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, "pack(rests, edges, length, out): see packing.py"},
    {"find", find, METH_VARARGS, "find(rows, tables, out): see packing.py"},
    {"locate", locate, METH_VARARGS, "locate(known, block, items, out): see packing.py"},
    {"place", place, METH_VARARGS, "place(items, sizes, out): see packing.py"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* calls share nothing but what their caller gives them */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_packing", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__packing(void)
{
    return PyModuleDef_Init(&definition);
}
