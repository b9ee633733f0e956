#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kiyot_fuzz::spdy(data));
