// Calls functions of this process on an emulated processor with AMX: Bochs' CPU, which has this
// process' memory at the same addresses. `build.sh` links it with the CPU alone; what that asks of
// the rest of a machine is answered here. One thread, no operating system: a system call returns 0.
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "bochs.h"
#include "cpu/cpu.h"
#include "gui/siminterface.h"
#include "iodev/iodev.h"
#include "memory/memory-bochs.h"
#include "param_names.h"
#include "pc_system.h"

namespace {

constexpr uint64_t PAGE = 4096, CHUNK = 1ull << 30;
constexpr uint64_t LOW = CHUNK;  // physical addresses below it: page tables
constexpr size_t STACK = 1 << 20;

jmp_buf back;
char said[256];
std::vector<uint64_t> chunks;  // of this process' addresses, by number; chunk i is at LOW + i * CHUNK
uint8_t *tables = nullptr;
uint64_t used = 0;

uint64_t *new_table(uint64_t *at) {
    if (!tables) tables = static_cast<uint8_t *>(mmap(nullptr, 16 << 20, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    *at = used += PAGE;
    std::memset(tables + *at, 0, PAGE);
    return reinterpret_cast<uint64_t *>(tables + *at);
}

// Tables of all memory that this process has now, in pages of 2 MiB; returns where they are.
uint64_t map_process() {
    std::set<uint64_t> found;
    FILE *maps = fopen("/proc/self/maps", "r");
    uint64_t first, end;
    char line[512];
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &first, &end) == 2 && end <= 1ull << 47)
            for (uint64_t at = first / CHUNK; at <= (end - 1) / CHUNK; ++at) found.insert(at);
    fclose(maps);
    chunks.assign(found.begin(), found.end());
    used = 0;
    uint64_t top_at;
    uint64_t *top = new_table(&top_at);
    std::map<uint64_t, uint64_t *> thirds;
    for (size_t i = 0; i < chunks.size(); ++i) {
        uint64_t at;
        uint64_t *&third = thirds[chunks[i] >> 9];
        if (!third) third = new_table(&at), top[chunks[i] >> 9] = at | 7;
        uint64_t *second = new_table(&at);
        third[chunks[i] & 511] = at | 7;
        for (uint64_t k = 0; k < 512; ++k) second[k] = (LOW + i * CHUNK + (k << 21)) | 0x87;
    }
    return top_at;
}

uint8_t *host(uint64_t at) {
    if (at < LOW) return tables + at;
    const uint64_t chunk = (at - LOW) / CHUNK;
    if (chunk >= chunks.size()) {
        snprintf(said, sizeof said, "physical address %lx", at);
        longjmp(back, 1);
    }
    return reinterpret_cast<uint8_t *>(chunks[chunk] * CHUNK + at % CHUNK);
}

class Simulator : public bx_simulator_interface_c {
    std::map<std::string, bx_param_num_c *> numbers;
    std::map<std::string, bx_param_bool_c *> switches;
    std::map<std::string, bx_param_enum_c *> choices;
    std::map<std::string, bx_param_string_c *> strings;

public:
    bx_param_num_c *get_param_num(const char *name, bx_param_c *) override {
        auto &made = numbers[name];
        if (!made) made = new bx_param_num_c(nullptr, name, "", "", 0, 1 << 30, number(name));
        return made;
    }
    bx_param_bool_c *get_param_bool(const char *name, bx_param_c *) override {
        auto &made = switches[name];
        if (!made) made = new bx_param_bool_c(nullptr, name, "", "", false);
        return made;
    }
    bx_param_enum_c *get_param_enum(const char *name, bx_param_c *) override {
        static const char *models[] = {
#define bx_define_cpudb(model) #model,
#include "cpudb.h"
#undef bx_define_cpudb
            nullptr};
        auto &made = choices[name];
        if (made) return made;
        int64_t which = 0;
        if (!strcmp(name, BXPN_CPU_MODEL))
            while (strcmp(models[which], "sapphire_rapids")) ++which;
        made = new bx_param_enum_c(nullptr, name, "", "", models, which, 0);
        return made;
    }
    bx_param_string_c *get_param_string(const char *name, bx_param_c *) override {
        auto &made = strings[name];
        if (!made) made = new bx_param_string_c(nullptr, name, "", "", "", 64);
        return made;
    }

private:
    static int64_t number(const std::string &name) {
        return name == BXPN_IPS ? 1000000 : 1;
    }
};

Simulator simulator;

void set_segment(bx_segment_reg_t *of, uint16_t selector, uint16_t attributes, uint64_t base) {
    BX_CPU(0)->set_segment_ar_data(of, true, selector, base, 0xffffffff, attributes);
}

}  // namespace

bx_simulator_interface_c *SIM = &simulator;
bx_list_c *root_param = nullptr;
BX_MEM_C bx_mem;
bx_pc_system_c bx_pc_system;
bx_devices_c bx_devices;
bx_debug_t bx_dbg;
logfunctions *pluginlog, *siminterface_log, *genlog = new logfunctions;
iofunctions *io = nullptr;
bx_gui_c *bx_gui = nullptr;
bool simulate_xapic = true;
Bit32u apic_id_mask = 0xff;
Bit8u bx_cpu_count = 1;
BX_CPU_C bx_cpu(0);

// What the processor asks of the rest of a machine.
BX_MEMORY_STUB_C::BX_MEMORY_STUB_C() = default;
BX_MEMORY_STUB_C::~BX_MEMORY_STUB_C() = default;
BX_MEM_C::BX_MEM_C() = default;
BX_MEM_C::~BX_MEM_C() = default;
Bit8u *BX_MEM_C::getHostMemAddr(BX_CPU_C *, bx_phy_address at, unsigned) { return host(at); }
void BX_MEM_C::readPhysicalPage(BX_CPU_C *, bx_phy_address at, unsigned count, void *to) {
    std::memcpy(to, host(at), count);
}
void BX_MEM_C::writePhysicalPage(BX_CPU_C *, bx_phy_address at, unsigned count, void *from) {
    std::memcpy(host(at), from, count);
}
bool BX_MEM_C::dbg_fetch_mem(BX_CPU_C *, bx_phy_address, unsigned, Bit8u *) { return false; }
bool BX_MEM_C::registerMemoryHandlers(void *, memory_handler_t, memory_handler_t,
                                      memory_direct_access_handler_t, bx_phy_address, bx_phy_address) {
    return true;
}
bx_pc_system_c::bx_pc_system_c() {
    a20_mask = ~0ull, kill_bochs_request = false, currCountdown = currCountdownPeriod = 1u << 30;
}
void bx_pc_system_c::countdownEvent() { currCountdown = 1u << 30; }
int bx_pc_system_c::register_timer_ticks(void *, bx_timer_handler_t, Bit64u, bool, bool,
                                         const char *) {
    return 0;
}
void bx_pc_system_c::activate_timer_ticks(unsigned, Bit64u, bool) {}
void bx_pc_system_c::deactivate_timer(unsigned) {}
void bx_pc_system_c::invlpg(bx_address) {}
int bx_pc_system_c::Reset(unsigned) { return 0; }
bx_devices_c::bx_devices_c() = default;
bx_devices_c::~bx_devices_c() = default;
Bit32u bx_devices_c::inp(Bit16u, unsigned) { return 0; }
void bx_devices_c::outp(Bit16u, Bit32u, unsigned) {}
Bit32u bx_pci_device_c::pci_read_handler(Bit8u, unsigned) { return 0; }
Bit64u BX_MEMORY_STUB_C::get_memory_len() { return 1ull << 40; }

int logfunctions::default_onoff[N_LOGLEV] = {};
logfunctions::logfunctions() {}
logfunctions::~logfunctions() {}
void logfunctions::info(const char *, ...) {}
void logfunctions::ldebug(const char *, ...) {}
void logfunctions::lwarn(const char *, ...) {}
void logfunctions::error(const char *, ...) {}
void logfunctions::put(const char *) {}
void logfunctions::put(const char *, const char *) {}
void logfunctions::panic(const char *format, ...) {
    va_list more;
    va_start(more, format);
    vsnprintf(said, sizeof said, format, more);
    va_end(more);
    longjmp(back, 1);
}
void logfunctions::fatal1(const char *format, ...) {
    snprintf(said, sizeof said, "fatal: %s", format);
    longjmp(back, 1);
}

void bx_instr_hlt(unsigned) { longjmp(back, 2); }
void bx_instr_exception(unsigned, unsigned vector, unsigned code) {
    snprintf(said, sizeof said, "exception %u (%x) at %lx, address %lx", vector, code,
             BX_CPU(0)->prev_rip, BX_CPU(0)->cr2);
    longjmp(back, 1);
}

extern "C" {

// Prepares the processor; returns what failed, or null.
const char *emulator_start() {
    if (setjmp(back)) return said;
    BX_CPU(0)->initialize();
    BX_CPU(0)->sanity_checks();
    BX_CPU(0)->reset(BX_RESET_HARDWARE);
    return nullptr;
}

// Calls a function of this process with whole numbers and addresses; returns what failed, or null.
const char *emulator_call(uint64_t function, const uint64_t *arguments, int count,
                          uint64_t *result) {
    static uint8_t *stack = nullptr, *code = nullptr;
    if (!stack) {
        stack = static_cast<uint8_t *>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        code = static_cast<uint8_t *>(mmap(nullptr, PAGE, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        // The end of the call; and a kernel that says yes to all that is asked: xor eax, eax; jmp rcx.
        std::memcpy(code, "\xf4", 1);
        std::memcpy(code + 16, "\x31\xc0\xff\xe1", 4);
    }
    BX_CPU_C *c = BX_CPU(0);
    uint64_t thread = 0;
    syscall(SYS_arch_prctl, 0x1003, &thread);  // ARCH_GET_FS
    c->cr0.set32(0x80050033);
    c->cr3 = map_process();
    c->cr4.set(1 << 5 | 1 << 9 | 1 << 10 | 1 << 16 | 1 << 18);
    c->efer.set32(0xd01);
    c->xcr0.set32(0x600e7);
    c->mxcsr.mxcsr = 0x1f80;
    c->msr.lstar = reinterpret_cast<uint64_t>(code + 16);
    c->msr.star = 8ull << 32;
    c->msr.fmask = 0;
    set_segment(&c->sregs[BX_SEG_REG_CS], 8, 0xa09b, 0);
    for (int i : {BX_SEG_REG_DS, BX_SEG_REG_ES, BX_SEG_REG_SS, BX_SEG_REG_GS})
        set_segment(&c->sregs[i], 16, 0xc093, 0);
    set_segment(&c->sregs[BX_SEG_REG_FS], 16, 0xc093, thread);
    c->setEFlags(2);
    const int order[] = {7, 6, 2, 1, 8, 9};  // rdi, rsi, rdx, rcx, r8, r9
    uint64_t *top = reinterpret_cast<uint64_t *>(stack + STACK - 4096);
    for (int i = 0; i < count; ++i)
        if (i < 6)
            c->gen_reg[order[i]].rrx = arguments[i];
        else
            top[i - 6] = arguments[i];
    *--top = reinterpret_cast<uint64_t>(code);
    c->gen_reg[4].rrx = c->prev_rsp = reinterpret_cast<uint64_t>(top);
    c->gen_reg[BX_64BIT_REG_RIP].rrx = c->prev_rip = function;
    c->activity_state = BX_CPU_C::BX_ACTIVITY_STATE_ACTIVE;
    c->async_event = 0;
    c->handleCpuContextChange();
    const int why = setjmp(back);
    if (why == 0) c->cpu_loop();
    *result = c->gen_reg[0].rrx;
    return why == 1 ? said : nullptr;
}

}  // extern "C"
