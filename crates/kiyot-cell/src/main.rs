//! `kiyot-cell`: the one program of ours in a cell.

fn main() {}
