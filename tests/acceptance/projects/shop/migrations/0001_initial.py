from django.db import migrations, models


def remember(apps, schema_editor):
    """A data migration of the user's that writes to the log."""
    from echomq_app.stream import Stream

    Stream("setup").append_on_commit({"step": "first"})
    Stream("setup").append_on_commit({"step": "second"})


class Migration(migrations.Migration):
    initial = True
    dependencies = [("echomq", "0002_sql_objects")]
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("item", models.CharField(max_length=50)),
            ],
        ),
        migrations.RunPython(remember, migrations.RunPython.noop),
    ]
