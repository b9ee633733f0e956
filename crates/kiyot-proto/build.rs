//! Generates the code of `proto/` at build time. No generated code is committed.

use std::{env, error::Error, fmt::Write, fs, path::PathBuf};

use prost::Message;
use prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};

/// The packages of messages that other programs send, with the modules of their Rust types.
const PACKAGES: [(&str, &str); 3] = [
    ("runtime.v1", "crate::cri"),
    ("kiyot.cell.v1", "crate::cell"),
    ("kiyot.admin.v1", "crate::admin"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    println!("cargo:rerun-if-changed={}", root.display());
    let files = [
        "cri/v1/runtime.proto",
        "cell/v1/cell.proto",
        "store/v1/store.proto",
        "admin/v1/admin.proto",
    ]
    .map(|file| root.join(file));
    let has_services = env::var_os("CARGO_FEATURE_SERVICES").is_some();
    tonic_prost_build::configure()
        .build_client(has_services)
        .build_server(has_services)
        .bytes(".kiyot")
        .codec_path("crate::codec::Codec")
        .file_descriptor_set_path(out.join("descriptors.bin"))
        .compile_protos(&files, &[root])?;
    let descriptors = FileDescriptorSet::decode(fs::read(out.join("descriptors.bin"))?.as_slice())?;
    let (shapes, each) = shapes(&descriptors)?;
    fs::write(out.join("shapes.rs"), shapes)?;
    fs::write(out.join("each.rs"), each)?;
    Ok(())
}

/// Returns an implementation of `Bounded` for each message, and a macro for tests that lists all
/// messages.
fn shapes(descriptors: &FileDescriptorSet) -> Result<(String, String), Box<dyn Error>> {
    let (mut code, mut all) = (String::new(), String::new());
    for file in &descriptors.file {
        let Some((package, _)) = PACKAGES.iter().find(|(package, _)| file.package() == *package)
        else {
            continue;
        };
        for message in &file.message_type {
            let (name, rust) =
                (message.name(), rust_type(&format!(".{package}.{}", message.name()))?);
            let mut fields = String::new();
            for field in &message.field {
                if let Some(kind) = kind(message, field)? {
                    write!(fields, "({}, {kind}), ", field.number())?;
                }
            }
            writeln!(
                code,
                "impl Bounded for {rust} {{\n    const SHAPE: Shape = \
                 Shape::new(\"{package}.{name}\", size_of::<Self>(), &[{fields}]);\n}}"
            )?;
            write!(all, "{rust}, ")?;
        }
    }
    let each = format!(
        "macro_rules! for_each_message {{\n    \
         ($callback:ident) => {{ $callback! {{ {all} }} }};\n}}\n"
    );
    Ok((code, each))
}

/// Returns how a field allocates, or `None` if it is a part of its message's struct.
fn kind(
    message: &DescriptorProto,
    field: &FieldDescriptorProto,
) -> Result<Option<String>, Box<dyn Error>> {
    let repeated = field.label() == Label::Repeated;
    Ok(match field.r#type() {
        Type::Message => {
            let entry = message.nested_type.iter().find(|nested| {
                field.type_name().ends_with(&format!(".{}.{}", message.name(), nested.name()))
            });
            if let Some(entry) = entry {
                if entry.field.iter().any(|part| part.r#type() != Type::String) {
                    return Err(format!(
                        "map {}: only maps of strings are supported",
                        field.name()
                    )
                    .into());
                }
                return Ok(Some("Field::Map".to_owned()));
            }
            let shape = format!("&<{} as Bounded>::SHAPE", rust_type(field.type_name())?);
            Some(format!("Field::{}({shape})", if repeated { "Messages" } else { "Message" }))
        }
        Type::Group => return Err(format!("{}: groups are not supported", field.name()).into()),
        Type::String | Type::Bytes if repeated => Some("Field::Texts".to_owned()),
        Type::String | Type::Bytes => Some("Field::Text".to_owned()),
        Type::Fixed32
        | Type::Fixed64
        | Type::Sfixed32
        | Type::Sfixed64
        | Type::Float
        | Type::Double
            if repeated =>
        {
            return Err(format!(
                "{}: repeated numbers of fixed width are not supported",
                field.name()
            )
            .into());
        }
        _ if repeated => Some("Field::Numbers".to_owned()),
        _ => None,
    })
}

/// Returns the path of the type that prost generates for a message.
fn rust_type(name: &str) -> Result<String, Box<dyn Error>> {
    for (package, module) in PACKAGES {
        if let Some(message) = name.strip_prefix(&format!(".{package}.")) {
            return Ok(format!("{module}::{}", upper_camel(message)));
        }
    }
    Err(format!("{name}: unknown package").into())
}

/// Converts a name to upper camel case as prost does: an abbreviation counts as a word.
fn upper_camel(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    let begins = |at: usize| {
        at == 0
            || letters[at].is_uppercase()
                && (!letters[at - 1].is_uppercase()
                    || letters.get(at + 1).is_some_and(|next| next.is_lowercase()))
    };
    letters
        .iter()
        .enumerate()
        .map(|(at, letter)| if begins(at) { *letter } else { letter.to_ascii_lowercase() })
        .collect()
}
